//! The suite can fail: a right backend behind a wrapper that breaks one thing, and what is told about it.

#![allow(clippy::expect_used)] // a test that panics has failed

mod common;

use std::collections::BTreeSet;

use structures_catalog::Catalog;
use structures_loader::PluginError;
use structures_plugin_api::describe::{Description, ProbeReport, ProbeShapes};
use structures_suite::executor::{Bound, Request};
use structures_suite::operand::{Data, Operand};
use structures_suite::{judge_all, Executor, Loaded, Outcome, Row};

/// What is broken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Biases do not arrive.
    MissingBias,
    /// Queries read the kv heads in the reverse order.
    HeadMapping,
    /// Rotary tables are off by one pair.
    RotaryPair,
    /// The last row of each output stays as it was.
    UnwrittenRow,
    /// Everything is a little too large.
    Scaled,
    /// A row count that the band admits is refused.
    RefusedRow,
}

struct Broken {
    inner: Loaded,
    description: Description,
    fault: Fault,
}

struct BrokenForm {
    inner: Box<dyn Bound>,
    inputs: Vec<String>,
    fault: Fault,
}

impl Broken {
    /// With the unquantised forms of these structures only.
    fn new(fault: Fault, structures: &[&str]) -> Self {
        let inner = common::built("portable");
        let mut description = inner.description().clone();
        description
            .forms
            .retain(|form| form.format == "none" && structures.contains(&form.structure.as_str()));
        assert_eq!(description.forms.len(), structures.len());
        Broken {
            inner,
            description,
            fault,
        }
    }

    fn rows(&self) -> Vec<Row> {
        let catalog = Catalog::builtin().expect("the built-in catalog loads");
        judge_all(self, &catalog).unwrap_or_else(|e| panic!("{e}"))
    }
}

impl Executor for Broken {
    fn description(&self) -> &Description {
        &self.description
    }

    fn probe(&self, form: &str, shapes: &ProbeShapes) -> Result<ProbeReport, PluginError> {
        let mut report = self.inner.probe(form, shapes)?;
        if self.fault == Fault::RefusedRow && shapes.rows == [1] {
            report.probed = false;
            report.code = Some("one_row".into());
        }
        Ok(report)
    }

    fn bind(&self, request: &Request) -> Result<Box<dyn Bound>, PluginError> {
        let mut request = request.clone();
        if self.fault == Fault::MissingBias {
            request.weights.retain(|(slot, _)| !slot.starts_with("b"));
        }
        Ok(Box::new(BrokenForm {
            inner: self.inner.bind(&request)?,
            inputs: request.params.inputs.clone(),
            fault: self.fault,
        }))
    }
}

impl Bound for BrokenForm {
    fn call(&self, inputs: &[Option<Operand>], outputs: &mut [Operand]) -> Result<(), PluginError> {
        let mut inputs = inputs.to_vec();
        for (name, operand) in self.inputs.iter().zip(&mut inputs) {
            let Some(operand) = operand else { continue };
            match (self.fault, name.as_str()) {
                (Fault::HeadMapping, "k" | "v") => reverse_heads(operand),
                (Fault::RotaryPair, "cos" | "sin") => roll(operand),
                _ => {}
            }
        }
        self.inner.call(&inputs, outputs)?;
        for output in outputs {
            let width = output.dims.last().copied().unwrap_or(1);
            let Data::F32(values) = &mut output.data else {
                continue;
            };
            match self.fault {
                Fault::UnwrittenRow => {
                    let kept = values.len().saturating_sub(width);
                    values[kept..].fill(f32::NAN);
                }
                Fault::Scaled => values.iter_mut().for_each(|v| *v *= 1.0001),
                _ => {}
            }
        }
        Ok(())
    }
}

/// `[B, Hkv, Skv, D]`
fn reverse_heads(operand: &mut Operand) {
    let [_, heads, keys, d] = operand.dims[..] else {
        return;
    };
    if let Data::F32(values) = &mut operand.data {
        for batch in values.chunks_exact_mut(heads * keys * d) {
            let heads: Vec<Vec<f32>> = batch.chunks_exact(keys * d).map(<[f32]>::to_vec).collect();
            for (to, from) in batch.chunks_exact_mut(keys * d).zip(heads.iter().rev()) {
                to.copy_from_slice(from);
            }
        }
    }
}

fn roll(operand: &mut Operand) {
    let width = operand.dims.last().copied().unwrap_or(1).max(1);
    if let Data::F32(values) = &mut operand.data {
        for row in values.chunks_exact_mut(width) {
            row.rotate_left(1);
        }
    }
}

fn codes(rows: &[Row]) -> BTreeSet<(Outcome, &str)> {
    let failing = rows.iter().filter(|row| !row.passed());
    failing
        .map(|row| (row.outcome, row.code.as_deref().unwrap_or("none")))
        .collect()
}

#[test]
fn a_missing_bias_is_seen_where_there_is_one() {
    let rows = Broken::new(Fault::MissingBias, &["linear_proj", "patch_projection"]).rows();
    assert_eq!(codes(&rows), [(Outcome::Failed, "parity")].into());
    for row in &rows {
        let (variant, present) = row.case.split_once(" with [").expect("a pattern");
        let given = present.split(']').next().expect("a list").split(' ');
        let has = variant.contains("bias=add") && given.into_iter().any(|name| name == "b");
        assert_eq!(row.passed(), !has, "{row}");
    }
}

#[test]
fn a_wrong_head_mapping_is_seen() {
    let rows = Broken::new(Fault::HeadMapping, &["attention_core"]).rows();
    assert_eq!(codes(&rows), [(Outcome::Failed, "parity")].into());
    // The wrapper breaks f32 only, and a call of one head has no mapping.
    let broken = |row: &&Row| row.case.ends_with("f32") && !row.case.contains(" rows, ");
    let broken = rows.iter().filter(broken);
    assert!(broken.clone().count() > 5);
    for row in broken {
        assert!(!row.passed(), "{row}");
    }
}

#[test]
fn a_rotary_table_that_is_off_by_one_pair_is_seen() {
    let rows = Broken::new(Fault::RotaryPair, &["qkv_rope", "qk_norm_rope"]).rows();
    assert_eq!(codes(&rows), [(Outcome::Failed, "parity")].into());
    let failed = rows.iter().filter(|row| !row.passed()).count();
    assert!(2 * failed > rows.len(), "{failed} of {}", rows.len());
}

#[test]
fn a_row_that_is_not_written_is_seen() {
    let rows = Broken::new(Fault::UnwrittenRow, &["norm_fused", "gated_delta_core"]).rows();
    assert_eq!(codes(&rows), [(Outcome::Failed, "unwritten")].into());
}

#[test]
fn an_error_of_a_ten_thousandth_is_seen() {
    let rows = Broken::new(Fault::Scaled, &["adaln_producer", "vision_ffn"]).rows();
    assert_eq!(codes(&rows), [(Outcome::Failed, "parity")].into());
    let row = rows.iter().find(|row| !row.passed()).expect("one");
    assert!(
        row.error.is_some_and(|e| (5e-5..2e-4).contains(&e)),
        "{row}"
    );
}

#[test]
fn a_refusal_within_the_declaration_is_seen() {
    let rows = Broken::new(Fault::RefusedRow, &["norm_fused"]).rows();
    assert_eq!(codes(&rows), [(Outcome::Refused, "one_row")].into());
}
