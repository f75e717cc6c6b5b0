//! `calibrate`: the scales a scheme asks for, as a precision spec. What was measured before for the same model, samples
//! and scheme is not measured again.

use serde_json::json;
use structures::attach::{self, Options};
use structures::host::{Host, Loaded};
use structures::samples::Samples;
use structures::stats::cache::{self, CacheKey, CalibrationCache, Stale};
use structures::stats::Balance;
use structures_loader::search::Environment;

use super::{load_samples, open_model, Context};
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
    let options = Options {
        scheme: args.scheme.clone(),
        percentile: args.samples.percentile,
        ..Options::default()
    };
    let key = key(&host, &model, &samples, &options)?;
    let cache = Environment::capture()
        .cache_dir
        .map(|dir| CalibrationCache::new(cache::directory(&dir)));
    let stored = match &cache {
        Some(cache) => cache.load(&key, args.recompute),
        None => Err(Stale::Missing),
    };
    let (calibration, dtypes, scheme, cached) = match stored {
        Ok(stored) => {
            let selected = host.schemes.select(&options.scheme, &host.capabilities());
            let name = selected
                .map_err(structures::Error::from)?
                .scheme
                .name()
                .to_string();
            (stored.calibration, stored.activation_dtypes, name, true)
        }
        Err(stale) => {
            match (&stale, &cache) {
                (Stale::Changed | Stale::Unreadable(_), Some(cache)) => {
                    let file = cache.path(&key);
                    tracing::warn!("{}: {stale}; measured again", file.display());
                }
                _ => tracing::info!("{stale}"),
            }
            let progress = Bars::new(cx.global.quiet);
            let found = attach::calibrate(&host, &model, &samples, &options, &progress)?;
            progress.finish();
            if let Some(cache) = &cache {
                let alpha = Balance::default().alpha;
                if let Err(e) = cache.store(&key, &found.calibration, &found.dtypes, alpha) {
                    tracing::warn!("the calibration is not kept: {e}");
                }
            }
            let name = found.selected.scheme.name().to_string();
            (found.calibration, found.dtypes, name, false)
        }
    };
    let spec = attach::precision_spec(&calibration, &dtypes)?;
    spec.validate().map_err(structures::Error::from)?;
    let document = json!({
        "schema": 1, "model": model.name(), "scheme": scheme,
        "precision_spec": spec, "statistics": calibration.statistics().map_err(structures::Error::from)?,
        "calibration": calibration.note,
    });
    let text = format!("{document:#}\n");
    structures::fsio::write_atomic(&args.output, text.as_bytes())?;
    if cx.out.json() {
        let mut document = document;
        document["cached"] = cached.into();
        cx.out.document(document);
        return Ok(0);
    }
    let note = &calibration.note;
    cx.out.line(&format!(
        "{} points from {} samples ({} held out, source {}) -> {}",
        note.points,
        note.samples,
        samples.samples().len() - note.samples,
        note.source,
        args.output.display()
    ));
    if let Some(d) = &note.dispersion {
        cx.out.lines(&d.summary());
    }
    if note.points == 0 {
        cx.out
            .line(&format!("scheme {} asks for no statistic", scheme));
    }
    if cached {
        cx.out.line("nothing was measured: this model, these samples and this scheme were calibrated before");
    }
    Ok(0)
}

/// What a stored calibration must be an answer to.
fn key(
    host: &Host,
    model: &Loaded,
    samples: &Samples,
    options: &Options,
) -> Result<CacheKey, Failure> {
    let tokens: Vec<&[u32]> = samples.all().collect();
    let specs: Vec<&str> = host
        .catalog
        .newest()
        .iter()
        .map(|s| s.digest.as_str())
        .collect();
    let forms: Vec<(&str, &str, &str)> = host
        .forms()
        .iter()
        .map(|c| {
            (
                c.form.structure.as_str(),
                c.form.format.as_str(),
                c.form.activation_format.as_str(),
            )
        })
        .collect();
    let question = cache::question(&json!({
        "program": env!("CARGO_PKG_VERSION"), "model": model.sha256()?, "scheme": options.scheme,
        "percentile": options.percentile, "source": samples.source(), "tokens": tokens,
        "specs": specs, "forms": forms,
    }))?;
    Ok(CacheKey {
        checkpoint: model.hash()?,
        sequence: tokens.iter().map(|t| t.len()).max().unwrap_or(0),
        question,
    })
}
