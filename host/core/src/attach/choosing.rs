//! Which sites take part and which forms are offered to each, in order: pin, record, declaration.
//!
//! Owns the order at a site and what is said of forms that are passed over. What qualifies is [`crate::choose`], what a
//! scheme wants [`crate::schemes`], what was once measured to be fastest [`crate::decisions`].

use std::collections::BTreeMap;

use super::Prepared;
use crate::choose::{median_rows, order_decided, qualify, Choice, Pin, Wanted};
use crate::decisions::Resolved;
use crate::receipt::RefusalNote;
use crate::schemes::Decision;

impl<'a> Prepared<'a> {
    /// Sites the scheme did not keep on the host and nothing adopted.
    pub(super) fn eligible(&self) -> impl Iterator<Item = usize> + '_ {
        let adopted = |i: &usize| {
            let id = self.survey.sites[*i].id();
            self.adopted.iter().any(|b| b.install.name == id)
        };
        (0..self.survey.sites.len())
            .filter(|i| !matches!(self.decisions[*i], Decision::Keep { .. }))
            .filter(move |i| !adopted(i))
    }

    /// Forms for a site in the order of choice.
    pub(super) fn choices(&self, site: usize) -> Vec<Choice<'a>> {
        let structure = &self.survey.sites[site].spec.name;
        let wanted = match &self.decisions[site] {
            Decision::Route { format, .. } => Wanted::Format(format),
            Decision::Default => Wanted::Unquantised,
            Decision::Keep { .. } => return Vec::new(),
        };
        self.ordered(structure, wanted, median_rows(&self.seams[site].rows))
    }

    /// Forms of a structure: pin, then what is recorded for these rows on this device, then as declared.
    pub(super) fn ordered(
        &self,
        structure: &str,
        wanted: Wanted<'_>,
        rows: u64,
    ) -> Vec<Choice<'a>> {
        let recorded: Vec<Pin> = self
            .host
            .decisions
            .lookup(&self.device, structure, rows)
            .and_then(|d| Pin::parse(&format!("{structure}={}", d.winner)).ok())
            .into_iter()
            .collect();
        let pins = &self.options.pins;
        order_decided(&self.host.forms(), structure, wanted, pins, &recorded)
    }

    /// Who named the first form of every structure at every number of rows, and what fell through.
    pub(super) fn resolved(&self) -> Vec<Resolved> {
        let mut groups: BTreeMap<(&str, u64), Vec<usize>> = BTreeMap::new();
        for (i, site) in self.survey.sites.iter().enumerate() {
            let rows = median_rows(&self.seams[i].rows);
            let group = groups.entry((&site.spec.name, rows)).or_default();
            group.push(i);
        }
        let store = &self.host.decisions;
        groups
            .into_iter()
            .map(|((structure, rows), sites)| {
                let misses = |choice: &Choice<'_>| {
                    let mut first = None;
                    for i in &sites {
                        let (site, seen) = (&self.survey.sites[*i], &self.seams[*i].rows);
                        match qualify(site, choice, "f32", seen) {
                            Ok(_) => return None,
                            Err(no) => {
                                first = first.or(Some(format!("{}: {}", no.code, no.reason)))
                            }
                        }
                    }
                    first
                };
                let site = sites[0];
                let ordered = match &self.decisions[site] {
                    Decision::Keep { .. } => Vec::new(),
                    _ => self.choices(site),
                };
                let pins = &self.options.pins;
                store.resolve(&self.device, structure, rows, &ordered, pins, &misses)
            })
            .collect()
    }

    /// No form at all for what the scheme wants at a site.
    pub(super) fn no_form(&self, site: usize) -> RefusalNote {
        let wanted = match &self.decisions[site] {
            Decision::Route { format, .. } => format!("in format `{format}`"),
            _ => "that does not quantise".into(),
        };
        let s = &self.survey.sites[site];
        RefusalNote {
            path: s.seam.path.clone(),
            structure: s.spec.name.clone(),
            stage: "choose".into(),
            code: "format_no_variant".into(),
            reason: format!("no loaded plugin has a form of `{}` {wanted}", s.spec.name),
            plugin: None,
            form: None,
        }
    }

    /// A form of a plugin that calls itself a reference, passed over.
    pub(super) fn yardstick(&self, site: usize, choice: &Choice<'_>) -> RefusalNote {
        let s = &self.survey.sites[site];
        let (name, plugin, form) = (&s.spec.name, choice.plugin, &choice.form.name);
        RefusalNote {
            path: s.seam.path.clone(),
            structure: name.clone(),
            stage: "choose".into(),
            code: "reference_unpinned".into(),
            reason: format!(
                "`{plugin}` is a reference to compare with, which is bound without a gate only when pinned: \
                 {name}={plugin}:{form}"
            ),
            plugin: Some(plugin.into()),
            form: Some(form.clone()),
        }
    }
}
