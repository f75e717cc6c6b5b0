//! Binding again what held before, from what is kept of it on the shelf, without reading the host's large matrices.
//!
//! Owns what must be the same before that is believed: the one small call that was kept must be answered bit by bit. What
//! the shelf is and how names on it come about is [`crate::kept`]; anything else binds and compares as at first.

use std::collections::BTreeSet;
use std::sync::Arc;

use structures_graph::Dim;
use structures_loader::Plugin;
use structures_seams::{LocatedSpan, SlotWeight};

use super::make::Made;
use super::{Bench, Bound, Loaded, Place};
use crate::choose::Choice;
use crate::sites::Site;
use crate::trial::repeats;

/// Elements of a stored matrix worth not reading: below, a name costs more than it.
const LARGE: usize = 1 << 16;

impl Bench<'_> {
    /// Binds again what held before, from what is kept of it, without a matrix of the host's: `None` where nothing is
    /// kept, or what is kept does not answer as then.
    pub fn again(
        &self,
        site: &Site<'_>,
        span_index: usize,
        choice: &Choice<'_>,
        plugin: &Plugin,
        rows: &[u64],
    ) -> Option<Bound> {
        let place = self.place(site, span_index, choice, plugin, rows);
        let made = self.remake(&place)?;
        Some(self.seated(&place, made))
    }

    /// See [`Bench::again`].
    fn remake(&self, place: &Place<'_>) -> Option<Made> {
        let form = place.choice.form;
        let span = place.located();
        let mut draft = self.draft(place, None).ok()?;
        let (shelf, name) = self.shelved(place, &draft)?;
        let witness = shelf.witness(&name)?;
        let large = self.large(span);
        if !large.is_empty() && !form.keeps_packed {
            return None;
        }
        let held = |slot: &String| large.contains(slot);
        let weights = self.weights_without(place.site.spec, span, &held).ok()?;
        if form.keeps_packed {
            draft.params.kept = shelf.kept(&name, true);
        }
        let bound = self.bind_draft(place, &draft, &weights);
        let bound = bound.ok()?.inspect_err(|e| {
            tracing::debug!(seat = %place.site.id(), "not bound from what is kept: {}", e.message);
        });
        let bound = bound.ok()?;
        let facts = bound.facts();
        let executable = Arc::new(Loaded::new(bound, place.plugin, 0).ok()?);
        if !repeats(&*executable, &witness) {
            tracing::warn!(seat = %place.site.id(), "does not answer as it did; bound and compared as at first");
            return None;
        }
        draft.params.kept = None;
        let row_axes = self.row_axes(span);
        Some(self.made(
            place,
            draft,
            executable,
            facts,
            witness.inputs,
            row_axes,
            weights,
        ))
    }

    /// Slots whose stored matrices are worth not reading.
    fn large(&self, span: &LocatedSpan) -> BTreeSet<String> {
        let large = |source: &SlotWeight| {
            let dims = source
                .stored()
                .and_then(|a| self.session.param_dims(&a.param()));
            let size = |d: &Dim| if let Dim::Size(n) = d { *n } else { 1 };
            dims.is_some_and(|d| d.len() > 1 && d.iter().map(size).product::<usize>() >= LARGE)
        };
        let slots = span.weights.iter().filter(|(_, source)| large(source));
        slots.map(|(name, _)| name.clone()).collect()
    }
}
