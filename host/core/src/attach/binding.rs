//! One form at one site: everything that may stand against it before the bind, then the bind.
//!
//! Owns the order of those questions (span, owner, memory, scheme, plugin). What binding is, and bind parity, is
//! [`crate::bind`].

use std::collections::{BTreeMap, HashMap};

use structures_graph::OpId;

use super::prepare::scheme_form;
use super::Prepared;
use crate::adopt::Blocks;
use crate::bind::{Bench, Bound, NotBound};
use crate::choose::{qualify, Choice};
use crate::receipt::RefusalNote;
use crate::schemes::{self, Decision};

impl Prepared<'_> {
    /// Binds a form at a site. `owners` says who keeps which operation: the span this form takes may be wider than
    /// the one the site won with.
    pub(super) fn bind(
        &self,
        site: usize,
        choice: &Choice<'_>,
        owners: &HashMap<OpId, String>,
    ) -> Result<Bound, NotBound> {
        let s = &self.survey.sites[site];
        let rows = &self.seams[site].rows;
        let not = |note: RefusalNote| Err(note.into());
        let span = match qualify(s, choice, "f32", rows) {
            Ok(span) => span,
            Err(note) => return not(note),
        };
        let blank = |code: &str, reason: String| RefusalNote {
            path: s.seam.path.clone(),
            structure: s.spec.name.clone(),
            stage: "choose".into(),
            code: code.into(),
            reason,
            plugin: Some(choice.plugin.into()),
            form: Some(choice.form.name.clone()),
        };
        let me = s.id();
        let other = s.spans[span]
            .ops
            .iter()
            .find_map(|op| owners.get(op).filter(|o| **o != me));
        if let Some(owner) = other {
            let name = &s.spans[span].name;
            let reason = format!("`{owner}` keeps an operation of span `{name}`");
            return not(blank("owned_by", reason));
        }
        if let Err(reason) = self.host.check_memory() {
            return not(blank("insufficient_memory", reason));
        }
        if let Err((code, reason)) = self.scheme_admits(site, choice) {
            return not(blank(code, reason));
        }
        let scheme = match &self.decisions[site] {
            Decision::Route { params, .. } => params.clone().into_iter().collect(),
            _ => BTreeMap::new(),
        };
        let bench = Bench {
            session: self.model.session(),
            calibration: &self.calibration,
            contents: &self.contents,
            on_guard_fail: self.options.on_guard_fail,
            scheme: &scheme,
            blocks: &Blocks::new(),
            shelf: None,
        };
        if choice.is_own() {
            return bench.bind_table(s, span, choice, rows);
        }
        let Some(plugin) = self.host.registry.plugin(choice.plugin) else {
            let reason = format!("plugin `{}` is not loaded", choice.plugin);
            return not(blank("plugin_unknown", reason));
        };
        bench.bind(s, span, choice, plugin, rows)
    }

    /// Whether the scheme delivers what a form needs at a site and allows what it does there.
    pub(super) fn scheme_admits(
        &self,
        site: usize,
        choice: &Choice<'_>,
    ) -> Result<(), (&'static str, String)> {
        let form = scheme_form(choice);
        if let Some(reason) = self.scheme_plan.undelivered(&self.seams[site], &form) {
            return Err(("statistic_unmeasurable", reason));
        }
        if let Some(dtype) = &choice.form.rounds {
            if !self.selected.scheme.allows_rounding(dtype) {
                let scheme = self.selected.scheme.name();
                let reason =
                    format!("the form rounds to {dtype}, which scheme {scheme} does not allow");
                return Err(("rounds_not_allowed", reason));
            }
        }
        match &self.decisions[site] {
            Decision::Route { params, .. } => match schemes::unserved(params, &form) {
                Some(reason) => Err(("format_no_variant", reason)),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }
}
