//! `calibrate`: the scales a scheme asks for, as a precision spec.

use serde_json::json;
use structures::attach;

use super::{attach::default_options, load_samples, open_model, Context};
use crate::args::CalibrateArgs;
use crate::failure::Failure;
use crate::progress::Bars;
use crate::writable;

/// See the module.
pub fn run(args: &CalibrateArgs, cx: &Context<'_>) -> Result<u8, Failure> {
    writable::file("-o", &args.output)?;
    let host = cx.host()?;
    let model = open_model(&args.model)?;
    let samples = load_samples(&model, &args.samples)?;
    let progress = Bars::new(cx.global.quiet);
    let mut options = default_options();
    options.scheme.clone_from(&args.scheme);
    options.percentile = args.samples.percentile;
    let (calibration, selected) = attach::calibrate(&host, &model, &samples, &options, &progress)?;
    progress.finish();
    let spec = attach::precision_spec(&calibration)?;
    spec.validate().map_err(structures::Error::from)?;
    let document = json!({
        "schema": 1, "model": model.name(), "scheme": selected.scheme.name(),
        "precision_spec": spec, "calibration": calibration.note,
    });
    let text = format!("{document:#}\n");
    structures::fsio::write_atomic(&args.output, text.as_bytes())?;
    if cx.out.json() {
        cx.out.document(document);
        return Ok(0);
    }
    let note = &calibration.note;
    cx.out.line(&format!(
        "{} points from {} samples ({} held out, source {}) -> {}",
        spec.activations.len(),
        note.samples,
        samples.samples().len() - note.samples,
        note.source,
        args.output.display()
    ));
    if let Some(d) = &note.dispersion {
        cx.out.line(&d.summary());
    }
    if spec.activations.is_empty() {
        cx.out.line(&format!(
            "scheme {} asks for no statistic",
            selected.scheme.name()
        ));
    }
    Ok(0)
}
