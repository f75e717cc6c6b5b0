//! Which forms may serve a site, in the order they are tried.
//!
//! Pin, then recorded decision, then declared priority, then plugin id, then device (the CPU last), then declared
//! precision, then form name; a plugin that calls itself a reference comes after every other that no decision names. Never
//! directory order.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use structures_plugin_api::describe::{DimBand, FormDecl};

use crate::receipt::RefusalNote;
use crate::sites::Site;
use crate::steps;

/// One form of one plugin, as a choice.
#[derive(Clone, Debug)]
pub struct Choice<'p> {
    /// Plugin id.
    pub plugin: &'p str,
    /// The plugin is a yardstick.
    pub reference: bool,
    /// The declaration.
    pub form: &'p FormDecl,
    /// Number of the plugin's device it would run on; 0 is the CPU.
    pub device: u32,
}

impl Choice<'_> {
    /// Offered by the host itself.
    pub fn is_own(&self) -> bool {
        self.plugin == steps::PROVIDER && self.form.name == steps::FORM
    }
}

/// `STRUCTURE=PLUGIN[:FORM][@DEVICE]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Structure.
    pub structure: String,
    /// Plugin id.
    pub plugin: String,
    /// Form name; any when absent.
    pub form: Option<String>,
    /// Number of the plugin's device; any when absent.
    pub device: Option<u32>,
}

impl std::fmt::Display for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}={}", self.structure, self.plugin)?;
        if let Some(form) = &self.form {
            write!(f, ":{form}")?;
        }
        match self.device {
            Some(device) => write!(f, "@{device}"),
            None => Ok(()),
        }
    }
}

impl Pin {
    /// Parses the switch.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("pin `{text}`: expected STRUCTURE=PLUGIN[:FORM][@DEVICE]");
        let (structure, rest) = text.split_once('=').ok_or_else(wrong)?;
        let (rest, device) = match rest.split_once('@') {
            Some((rest, number)) => (rest, Some(number.parse().map_err(|_| wrong())?)),
            None => (rest, None),
        };
        let (plugin, form) = match rest.split_once(':') {
            Some((p, f)) => (p, Some(f.to_string())),
            None => (rest, None),
        };
        if structure.is_empty() || plugin.is_empty() || form.as_deref() == Some("") {
            return Err(wrong());
        }
        Ok(Pin {
            structure: structure.into(),
            plugin: plugin.into(),
            form,
            device,
        })
    }

    pub(crate) fn allows(&self, choice: &Choice<'_>) -> bool {
        choice.plugin == self.plugin
            && self.form.as_ref().is_none_or(|f| *f == choice.form.name)
            && self.device.is_none_or(|d| d == choice.device)
    }
}

/// What a site is wanted for.
#[derive(Clone, Copy, Debug)]
pub enum Wanted<'a> {
    /// A format a scheme routed to.
    Format(&'a str),
    /// Any form that neither quantises nor rounds.
    Unquantised,
    /// Any form: adjudication.
    Any,
}

impl Wanted<'_> {
    fn matches(self, form: &FormDecl) -> bool {
        match self {
            Wanted::Format(format) => form.format == format,
            Wanted::Unquantised => !form.quantises && form.rounds.is_none(),
            Wanted::Any => true,
        }
    }
}

/// All forms of all plugins for a structure, in the order of choice.
pub fn order<'p>(
    choices: &[Choice<'p>],
    structure: &str,
    wanted: Wanted<'_>,
    pins: &[Pin],
) -> Vec<Choice<'p>> {
    order_decided(choices, structure, wanted, pins, &[])
}

/// The same with recorded decisions: the form a decision names for the structure is tried first, the others after it.
/// Unlike a pin it excludes nothing, and one that names what is not there changes nothing.
pub fn order_decided<'p>(
    choices: &[Choice<'p>],
    structure: &str,
    wanted: Wanted<'_>,
    pins: &[Pin],
    decisions: &[Pin],
) -> Vec<Choice<'p>> {
    let pin = pins.iter().find(|p| p.structure == structure);
    let mut list: Vec<Choice<'p>> = choices
        .iter()
        .filter(|c| c.form.structure == structure && wanted.matches(c.form))
        .filter(|c| pin.is_none_or(|p| p.allows(c)))
        .cloned()
        .collect();
    let decided = |c: &Choice<'_>| {
        decisions
            .iter()
            .any(|d| d.structure == structure && d.allows(c))
    };
    list.sort_by(|a, b| {
        let key = |c: &Choice<'_>| (!decided(c), c.reference, Reverse(c.form.priority));
        // Of one plugin the more precise form first; a device before the CPU: who has one has it for this.
        let own = |c: &Choice<'_>| (c.device == 0, c.form.precision_rank, c.form.name.clone());
        (key(a), a.plugin, own(a), a.device).cmp(&(key(b), b.plugin, own(b), b.device))
    });
    list
}

/// The span of a site a form would take, or why it cannot serve the site. `rows` are those observed at its input.
pub fn qualify(
    site: &Site<'_>,
    choice: &Choice<'_>,
    dtype: &str,
    rows: &[u64],
) -> Result<usize, RefusalNote> {
    qualify_at(site, choice, dtype, rows, |_| true)
}

/// The same among some of the site's spans, by their index.
pub fn qualify_at(
    site: &Site<'_>,
    choice: &Choice<'_>,
    dtype: &str,
    rows: &[u64],
    wanted: impl Fn(usize) -> bool,
) -> Result<usize, RefusalNote> {
    let form = choice.form;
    let refuse = |code: &str, reason: String| {
        Err(RefusalNote {
            path: site.seam.path.clone(),
            structure: site.spec.name.clone(),
            stage: "choose".into(),
            code: code.into(),
            reason,
            plugin: Some(choice.plugin.into()),
            form: Some(form.name.clone()),
        })
    };
    if !form.spec_versions.contains(&site.spec.version) {
        return refuse(
            "spec_version",
            format!(
                "the form accepts versions {:?}, the catalog has {}",
                form.spec_versions, site.spec.version
            ),
        );
    }
    if !form.dtypes.iter().any(|d| d == dtype) {
        return refuse(
            "boundary_dtype",
            format!(
                "the host computes in {dtype}, the form accepts {:?}",
                form.dtypes
            ),
        );
    }
    // A span may hold under several values of an axis nobody else knows, the wider one first: the form takes the
    // first it accepts.
    let offered: Vec<usize> = form
        .spans
        .iter()
        .flat_map(|name| {
            let named = (0..site.spans.len()).filter(|i| site.spans[*i].name == *name);
            named.filter(|i| wanted(*i)).collect::<Vec<_>>()
        })
        .collect();
    let Some(first) = offered.first() else {
        let held: Vec<&str> = site.spans.iter().map(|s| s.name.as_str()).collect();
        return refuse(
            "span_unknown",
            format!(
                "the form implements {:?}, on this host {held:?} hold",
                form.spans
            ),
        );
    };
    let accepted = offered
        .iter()
        .find(|i| foreign_axis(form, &variant_of(site, **i)).is_none());
    let Some(&span) = accepted else {
        let why = foreign_axis(form, &variant_of(site, *first)).unwrap_or_default();
        return refuse("format_no_variant", why);
    };
    for (symbol, band) in &form.band.dims {
        if let Err(reason) = within(symbol, band, site.spans[span].dims.get(symbol).copied()) {
            return refuse("envelope", reason);
        }
    }
    if let Some([lo, hi]) = form.band.rows {
        if !rows.is_empty() && !rows.iter().any(|r| (lo..=hi).contains(r)) {
            return refuse(
                "form_band",
                format!(
                    "form {}: rows observed here: {} at {}; the form serves {lo}..={hi}, and other forms have bands of \
                     their own",
                    form.name,
                    row_note(rows),
                    size_note(site.spans[span].dims.iter())
                ),
            );
        }
    }
    let dims: BTreeMap<String, u64> = site.spans[span]
        .dims
        .iter()
        .map(|(symbol, size)| (symbol.clone(), *size))
        .collect();
    if let Err(reason) = form.band.any_holds(rows, &dims) {
        return refuse("form_band", format!("form {}: {reason}", form.name));
    }
    if let Some(work) = &form.band.work {
        let median = median_rows(rows);
        if let Err(reason) = work.admits(median, &dims) {
            return refuse("form_band", format!("form {}: {reason}", form.name));
        }
    }
    Ok(span)
}

/// Sizes of a place, for a refusal.
fn size_note<'d>(dims: impl Iterator<Item = (&'d String, &'d u64)>) -> String {
    let sizes: Vec<String> = dims.map(|(s, n)| format!("{s} {n}")).collect();
    sizes.join(" x ")
}

/// The first axis whose value the form does not accept, as a sentence.
fn foreign_axis(form: &FormDecl, variant: &BTreeMap<String, String>) -> Option<String> {
    form.variants
        .iter()
        .find_map(|(axis, accepted)| match variant.get(axis) {
            Some(value) if accepted.contains(value) => None,
            value => {
                let value = value.map_or("not known", String::as_str);
                Some(format!("{axis} is {value}, the form accepts {accepted:?}"))
            }
        })
}

/// Host axes as the graph shows them for this span, the seam's values for the rest, form axes at their default. An axis
/// that none of these knows is one no operation of the span mentions: its first value stands for all of them.
pub fn variant_of(site: &Site<'_>, span: usize) -> BTreeMap<String, String> {
    let mut variant: BTreeMap<String, String> = site
        .spec
        .variants
        .iter()
        .filter_map(|(axis, a)| {
            let first = a.default.as_ref().or_else(|| a.values.keys().next());
            Some((axis.clone(), first?.clone()))
        })
        .collect();
    variant.extend(
        site.seam
            .variant
            .iter()
            .map(|(k, v)| (k.clone(), v.clone())),
    );
    variant.extend(
        site.spans[span]
            .axes
            .iter()
            .map(|(k, v)| (k.clone(), v.clone())),
    );
    variant
}

fn within(symbol: &str, band: &DimBand, size: Option<u64>) -> Result<(), String> {
    match size {
        None => Err(format!("{symbol} is not known here")),
        Some(n) if n < band.min || n > band.max => Err(format!(
            "{symbol} is {n}, the form serves {}..={}",
            band.min, band.max
        )),
        Some(n) if band.multiple_of > 1 && n % band.multiple_of != 0 => Err(format!(
            "{symbol} is {n}, the form wants a multiple of {}",
            band.multiple_of
        )),
        Some(_) => Ok(()),
    }
}

/// The middle of ascending row counts; 1 where none was observed.
pub fn median_rows(rows: &[u64]) -> u64 {
    rows.get(rows.len() / 2).copied().unwrap_or(1)
}

/// Distinct row counts, ascending, with how often each was seen.
pub fn row_note(rows: &[u64]) -> String {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    for r in rows {
        *counts.entry(*r).or_default() += 1;
    }
    let parts: Vec<String> = counts.iter().map(|(r, n)| format!("{r} (x{n})")).collect();
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(priority: i32, format: &str) -> FormDecl {
        FormDecl {
            priority,
            quantises: format != "none",
            ..FormDecl::new("s", "f", format)
        }
    }

    #[test]
    fn the_order_is_priority_then_id_and_references_last() {
        let (a, b, c) = (form(0, "q"), form(5, "q"), form(9, "q"));
        let all = [
            Choice {
                plugin: "yardstick",
                reference: true,
                form: &c,
                device: 0,
            },
            Choice {
                plugin: "zeta",
                reference: false,
                form: &a,
                device: 0,
            },
            Choice {
                plugin: "alpha",
                reference: false,
                form: &a,
                device: 0,
            },
            Choice {
                plugin: "omega",
                reference: false,
                form: &b,
                device: 0,
            },
        ];
        let ids = |pins: &[Pin]| {
            order(&all, "s", Wanted::Format("q"), pins)
                .iter()
                .map(|c| c.plugin)
                .collect::<Vec<_>>()
        };
        assert_eq!(ids(&[]), ["omega", "alpha", "zeta", "yardstick"]);
        assert_eq!(ids(&[Pin::parse("s=zeta").unwrap()]), ["zeta"]);
        assert!(ids(&[Pin::parse("s=zeta:other").unwrap()]).is_empty());
        assert!(order(&all, "s", Wanted::Unquantised, &[]).is_empty());
        let rounding = FormDecl {
            rounds: Some("bf16".into()),
            ..form(0, "none")
        };
        let plain = form(0, "none");
        let of = |form| Choice {
            plugin: "p",
            reference: false,
            form,
            device: 0,
        };
        let both = [of(&rounding), of(&plain)];
        assert_eq!(order(&both, "s", Wanted::Unquantised, &[]).len(), 1);
    }

    #[test]
    fn the_order_never_depends_on_where_plugins_were_found() {
        let (low, high) = (form(0, "q"), form(5, "q"));
        let choice = |plugin, reference, form| Choice {
            plugin,
            reference,
            form,
            device: 0,
        };
        let all = [
            choice("alpha", false, &low),
            choice("omega", false, &high),
            choice("zeta", false, &low),
            choice("yardstick", true, &high),
        ];
        let ids = |found: &[Choice<'_>], decisions: &[Pin]| -> Vec<String> {
            order_decided(found, "s", Wanted::Format("q"), &[], decisions)
                .iter()
                .map(|c| c.plugin.to_string())
                .collect()
        };
        let decided = [
            Pin::parse("s=zeta:f").unwrap(),
            Pin::parse("t=alpha").unwrap(),
        ];
        let nowhere = [Pin::parse("s=nobody").unwrap()];
        for turn in 0..all.len() {
            let mut found = all.clone();
            found.rotate_left(turn);
            assert_eq!(ids(&found, &[]), ["omega", "alpha", "zeta", "yardstick"]);
            assert_eq!(
                ids(&found, &decided),
                ["zeta", "omega", "alpha", "yardstick"]
            );
            assert_eq!(ids(&found, &nowhere), ids(&found, &[]));
            let pins = [Pin::parse("s=alpha").unwrap()];
            let pinned = order_decided(&found, "s", Wanted::Format("q"), &pins, &decided);
            assert_eq!(pinned.len(), 1, "a pin leaves nothing to decide");
        }
    }

    #[test]
    fn a_malformed_pin_is_refused() {
        for bad in ["s", "=p", "s=", "s=p:"] {
            assert!(Pin::parse(bad).unwrap_err().contains(bad));
        }
    }
}
