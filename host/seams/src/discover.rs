//! Candidates in a module tree, by each structure's `slots`.
//!
//! Every named module is tried as `self` for every structure; what is shaped like one and passed over is a recorded
//! refusal with the code its document gives. Names of modules come from the documents only.

use indexmap::IndexMap;
use structures_catalog::expr::{eval, eval_bool, eval_int, eval_text, Datum, EvalError, Expr};
use structures_catalog::spec::{AxisRule, Check, Role, Slots, Spec, WeightSource};
use structures_graph::tree::family_template;
use structures_graph::ModuleTree;

use crate::dims::Solver;
use crate::refusal::{code, Refusal};
use crate::roles::{datum, Candidate};
use crate::seam::{Assumption, Discovery, Seam, SlotWeight, Source, WeightAddress};
use crate::unsaid::{asked_for_parameters, asked_for_weights, open_facts, truth, Truth};

/// Walks a tree: seams and refusals in module order, structures in the given order at each module.
pub fn discover(tree: &ModuleTree, specs: &[&Spec]) -> Discovery {
    let mut out = Discovery::default();
    let tried: Vec<(&Spec, &Slots, Vec<String>)> = specs
        .iter()
        .filter_map(|spec| {
            let slots = spec.slots.as_ref().filter(|s| s.at_module)?;
            Some((*spec, slots, may_be_bare(slots)))
        })
        .collect();
    for module in tree.modules().iter().filter(|m| !m.path.is_empty()) {
        for entry in &tried {
            let (_, slots, bare) = entry;
            let mut here: Vec<(Seam, String)> = Vec::new();
            for wanted in &slots.any {
                let Some(candidate) = Candidate::resolve(tree, &module.path, wanted, bare) else {
                    continue;
                };
                judge(entry, wanted, candidate, &mut here, &mut out.refused);
                if !slots.every {
                    break;
                }
            }
            out.seams.extend(distinct_keys(here));
        }
    }
    out
}

/// Roles whose modules may have no parameters, by what the document asks.
fn may_be_bare(slots: &Slots) -> Vec<String> {
    let axes = slots.axis.values().filter_map(|rule| match rule {
        AxisRule::Expr(e) => Some(e),
        AxisRule::Attr { .. } => None,
    });
    let checks = slots.checks.iter().map(|c| &c.that);
    let mut bare = asked_for_parameters(checks.clone().chain(slots.dims.values()).chain(axes));
    let weighted = asked_for_weights(checks);
    bare.retain(|role| !weighted.contains(role));
    bare
}

/// Several alternatives of one structure on one path are told apart by their first role.
fn distinct_keys(mut here: Vec<(Seam, String)>) -> Vec<Seam> {
    let paths: Vec<String> = here.iter().map(|(s, _)| s.path.clone()).collect();
    for (seam, first) in &mut here {
        if paths.iter().filter(|p| **p == seam.path).count() > 1 {
            seam.key = format!("{}[{first}]", seam.path);
        }
    }
    here.into_iter().map(|(s, _)| s).collect()
}

fn judge(
    (spec, slots, bare): &(&Spec, &Slots, Vec<String>),
    wanted: &IndexMap<String, Role>,
    mut candidate: Candidate<'_>,
    seams: &mut Vec<(Seam, String)>,
    refused: &mut Vec<Refusal>,
) {
    let mut alive: Vec<Option<String>> = if slots.emit.per.is_empty() {
        vec![None]
    } else {
        let roles = slots.emit.per.iter();
        roles
            .filter(|r| candidate.roles.contains_key(*r))
            .map(|r| Some(r.clone()))
            .collect()
    };
    let at = |candidate: &mut Candidate<'_>, role: &Option<String>| {
        candidate.current = role.as_ref().and_then(|r| candidate.roles.get(r).cloned());
    };
    let whole = |candidate: &mut Candidate<'_>| {
        candidate.current = None;
        match slots.emit.per.is_empty() {
            true => emitted(slots, candidate),
            false => candidate.own.clone(),
        }
    };
    // A candidate that one check refuses is asked the others too, so that it is told all that is wrong with it.
    let mut fell = false;
    let mut open: Vec<String> = Vec::new();
    let other = slots.closed.as_ref().zip(candidate.beside_roles());
    if let Some((code, param)) = other {
        let path = whole(&mut candidate);
        let reason = format!("`{param}` stands in none of its parts");
        let expected = format!(
            "parameters in {} alone",
            wanted
                .keys()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(", ")
        );
        refused.push(Refusal::new(&path, &spec.name, code, reason).expected_found(expected, param));
        fell = true;
    }
    for check in &slots.checks {
        if alive.is_empty() {
            return;
        }
        if check.refuse.is_none() && candidate.tree.headers_only && !asks_current(&check.that) {
            match truth(&check.that, &candidate) {
                Truth::Yes => {}
                Truth::No => return,
                Truth::Open(facts) => open.extend(facts),
            }
            continue;
        }
        // An attribute that a header leaves open is no reason to refuse by name.
        if candidate.tree.headers_only
            && !asks_current(&check.that)
            && !matches!(eval_bool(&check.that, &candidate), Ok(true))
        {
            let attrs = |facts: &[String]| facts.iter().all(|f| f.contains(".attr."));
            match truth(&check.that, &candidate) {
                Truth::Open(facts) if attrs(&facts) => {
                    open.extend(facts);
                    continue;
                }
                _ => {}
            }
        }
        if asks_current(&check.that) {
            if fell {
                continue;
            }
            alive.retain(|role| {
                at(&mut candidate, role);
                let path = emitted(slots, &candidate);
                matches!(
                    keep(spec, check, &candidate, path, false, refused),
                    Kept::Yes
                )
            });
        } else {
            let path = whole(&mut candidate);
            match keep(spec, check, &candidate, path, fell, refused) {
                Kept::Yes => {}
                Kept::Refused => fell = true,
                Kept::Passed => return,
            }
        }
    }
    if fell {
        let path = whole(&mut candidate);
        foreign_axes(spec, slots, &candidate, &path, refused);
        return;
    }
    let unasked = candidate.unseen.iter().filter(|r| !bare.contains(*r));
    open.extend(unasked.map(|role| format!("whether `{role}` is there")));
    if !open.is_empty() {
        let path = whole(&mut candidate);
        let facts = open.join(", ");
        let reason = format!("shaped like one, but headers do not say {facts}");
        refused.push(Refusal::new(
            &path,
            &spec.name,
            code::NOT_IN_HEADERS,
            reason,
        ));
        return;
    }
    let first = wanted
        .iter()
        .find(|(_, r)| !r.optional)
        .and_then(|(name, _)| candidate.roles.get(name))
        .map(|p| {
            p.strip_prefix(&format!("{}.", candidate.own))
                .unwrap_or(p)
                .to_string()
        })
        .unwrap_or_default();
    for role in &alive {
        at(&mut candidate, role);
        match emit(spec, slots, wanted, &candidate) {
            Ok(seam) if below_floor(spec, candidate.tree, &seam) => {}
            Ok(seam) => {
                let twin = |s: &Seam| s.path == seam.path && s.weights == seam.weights;
                if !seams.iter().any(|(s, _)| twin(s)) {
                    seams.push((seam, first.clone()));
                }
            }
            Err(refusal) => refused.push(refusal),
        }
    }
}

/// Whether a weight is smaller than the structure considers: not a candidate, nothing is recorded.
fn below_floor(spec: &Spec, tree: &ModuleTree, seam: &Seam) -> bool {
    spec.qualification.min_elements.iter().any(|(slot, floor)| {
        let stored = seam.weights.get(slot).and_then(SlotWeight::stored);
        let dims = stored.and_then(|a| stored_dims(tree, a));
        dims.is_some_and(|d| (d.iter().product::<usize>() as u64) < *floor)
    })
}

fn asks_current(expr: &Expr) -> bool {
    expr.roles().iter().any(|r| r == "role")
}

/// The path a seam of this candidate carries.
fn emitted(slots: &Slots, candidate: &Candidate<'_>) -> String {
    candidate
        .path(&slots.emit.path)
        .unwrap_or(&candidate.own)
        .to_string()
}

/// What a check makes of a candidate.
enum Kept {
    /// It holds.
    Yes,
    /// It does not, and its refusal is recorded.
    Refused,
    /// It does not, and this is not the structure.
    Passed,
}

/// Whether a check holds; records the refusal it declares when it does not. After an earlier refusal, a check that
/// has no value adds nothing.
fn keep(
    spec: &Spec,
    check: &Check,
    candidate: &Candidate<'_>,
    path: String,
    fell: bool,
    refused: &mut Vec<Refusal>,
) -> Kept {
    let (code, found, reason) = match (eval_bool(&check.that, candidate), &check.refuse) {
        (Ok(true), _) => return Kept::Yes,
        (Err(_), _) if fell => return Kept::Yes,
        (Ok(false), None) => return Kept::Passed,
        (Ok(false), Some(code)) => {
            let found = facts_of(&check.that, candidate);
            let reason = format!("`{}` does not hold: {found}", check.that);
            (code.as_str(), found, reason)
        }
        (Err(e), None) => {
            tracing::debug!(structure = %spec.name, %path, check = %check.that, error = %e, "not this structure");
            return Kept::Passed;
        }
        (Err(e), Some(code)) => {
            let reason = format!("`{}` cannot hold: {e}", check.that);
            (code.as_str(), e.to_string(), reason)
        }
    };
    refused.push(
        Refusal::new(&path, &spec.name, code, reason).expected_found(check.that.to_string(), found),
    );
    Kept::Refused
}

/// Records every axis whose attribute has a value the structure does not have.
fn foreign_axes(
    spec: &Spec,
    slots: &Slots,
    candidate: &Candidate<'_>,
    path: &str,
    refused: &mut Vec<Refusal>,
) {
    for (axis, rule) in &slots.axis {
        if let AxisRule::Attr { .. } = rule {
            let values = spec.variants.get(axis).map(|a| &a.values);
            if let Err(e) = axis_value(axis, rule, values, candidate, &mut Vec::new()) {
                refused.push(foreign(spec, path, values, e));
            }
        }
    }
}

fn foreign(
    spec: &Spec,
    path: &str,
    values: Option<&IndexMap<String, String>>,
    (code, reason, found): AxisError,
) -> Refusal {
    let want = values.map(|v| v.keys().cloned().collect::<Vec<_>>().join(", "));
    Refusal::new(path, &spec.name, &code, reason).expected_found(want.unwrap_or_default(), found)
}

/// The facts an expression reads, as they are here.
fn facts_of(expr: &Expr, candidate: &Candidate<'_>) -> String {
    let mut found: Vec<String> = Vec::new();
    expr.walk(&mut |e| {
        let leaf = matches!(
            e,
            Expr::Has(_)
                | Expr::Conditioned(_)
                | Expr::Takes(..)
                | Expr::Fact(..)
                | Expr::ParamDim(..)
                | Expr::ParamCount(..)
                | Expr::Attr(..)
        );
        if leaf {
            let value = match eval(e, candidate) {
                Ok(v) => v.to_string(),
                Err(_) => "absent".into(),
            };
            let text = format!("{e} = {value}");
            if !found.contains(&text) {
                found.push(text);
            }
        }
    });
    found.join(", ")
}

fn emit(
    spec: &Spec,
    slots: &Slots,
    wanted: &IndexMap<String, Role>,
    candidate: &Candidate<'_>,
) -> Result<Seam, Refusal> {
    let mut candidate = candidate.clone();
    let path = emitted(slots, &candidate);
    let refuse = |code: &str, reason: String| Refusal::new(&path, &spec.name, code, reason);
    let broken = |what: &str, e: EvalError| {
        refuse(
            code::SLOTS_EXPRESSION,
            format!("{what} cannot be computed: {e}"),
        )
    };
    for (symbol, expr) in &slots.dims {
        let n = eval_int(expr, &candidate).map_err(|e| broken(symbol, e))?;
        let n = u64::try_from(n)
            .map_err(|_| refuse(code::SLOTS_EXPRESSION, format!("{symbol} would be {n}")))?;
        candidate.dims.insert(symbol.clone(), n);
    }
    let mut assumptions = Vec::new();
    let mut variant = defaults(spec);
    let mut open_axes = open_defaults(spec);
    for (axis, rule) in &slots.axis {
        let values = spec.variants.get(axis).map(|a| &a.values);
        let value = axis_value(axis, rule, values, &candidate, &mut assumptions)
            .map_err(|e| foreign(spec, &path, values, e))?;
        if let Some(value) = value {
            let fact = spec.variants.get(axis).is_some_and(|a| a.host);
            if let (AxisRule::Expr(e), true) = (rule, fact) {
                let open = open_facts(e, &candidate);
                if !open.is_empty() {
                    let text = format!(
                        "{axis} is taken as {value}: headers do not say {}",
                        open.join(", ")
                    );
                    let about = axis.clone();
                    assumptions.push(Assumption { about, text });
                }
            }
            variant.insert(axis.clone(), value);
            open_axes.retain(|a| a != axis);
            if is_open(rule) || assumptions.iter().any(|a| a.about == *axis) {
                open_axes.push(axis.clone());
            }
        }
    }
    let weights = weights(spec, slots, wanted, &candidate, &mut assumptions)
        .map_err(|(code, reason)| refuse(code, reason))?;
    assumptions.extend(shared_input(spec, &weights));
    for role in &candidate.unseen {
        let text = format!(
            "`{role}` is taken to be there without parameters: headers do not show such a module"
        );
        assumptions.push(Assumption {
            about: role.clone(),
            text,
        });
    }
    let mut roles: IndexMap<String, String> = candidate.roles.clone();
    roles.insert("self".into(), candidate.own.clone());
    if let Some(current) = &candidate.current {
        roles.insert("role".into(), current.clone());
    }
    for (role, path) in &roles {
        if let Some(text) = candidate.tree.assumed.get(path) {
            if assumptions.iter().any(|a| a.text == *text) {
                continue;
            }
            assumptions.push(Assumption {
                about: role.clone(),
                text: text.clone(),
            });
        }
    }
    let parent = candidate
        .path(&slots.emit.parent)
        .unwrap_or_default()
        .to_string();
    Ok(Seam {
        structure: spec.name.clone(),
        version: spec.version,
        key: path.clone(),
        parent,
        variant: in_declared_order(spec, variant),
        family: family_template(&path).0,
        // The layer is that of the module the roles were found in: a number below it names a child.
        layer: family_template(&candidate.own).1,
        source: Source::Slots,
        located: false,
        spans: Vec::new(),
        assumptions,
        roles,
        weights,
        open_axes,
        dims: candidate.dims,
        path,
    })
}

/// The default value of every axis that has one.
pub(crate) fn defaults(spec: &Spec) -> IndexMap<String, String> {
    let axes = spec.variants.iter();
    axes.filter_map(|(n, a)| a.default.clone().map(|v| (n.clone(), v)))
        .collect()
}

/// Host axes that only have their default.
pub(crate) fn open_defaults(spec: &Spec) -> Vec<String> {
    let axes = spec
        .variants
        .iter()
        .filter(|(_, a)| a.host && a.default.is_some());
    axes.map(|(n, _)| n.clone()).collect()
}

/// Axes in the order the structure declares them.
pub(crate) fn in_declared_order(
    spec: &Spec,
    mut variant: IndexMap<String, String>,
) -> IndexMap<String, String> {
    let place = |axis: &String| spec.variants.get_index_of(axis);
    variant.sort_by(|a, _, b, _| place(a).cmp(&place(b)));
    variant
}

/// A rule that reads nothing of the host gives a word to report, not a fact.
fn is_open(rule: &AxisRule) -> bool {
    match rule {
        AxisRule::Expr(e) => e.roles().is_empty() && e.symbols().is_empty(),
        AxisRule::Attr { .. } => false,
    }
}

type AxisError = (String, String, String);

fn axis_value(
    axis: &str,
    rule: &AxisRule,
    values: Option<&IndexMap<String, String>>,
    candidate: &Candidate<'_>,
    assumptions: &mut Vec<Assumption>,
) -> Result<Option<String>, AxisError> {
    match rule {
        AxisRule::Expr(e) => eval_text(e, candidate).map(Some).map_err(|e| {
            let reason = format!("{axis} cannot be computed: {e}");
            (code::SLOTS_EXPRESSION.into(), reason, e.to_string())
        }),
        AxisRule::Attr {
            attr,
            of,
            map,
            default,
            foreign,
        } => {
            let module = candidate.module(of);
            let found = attr.iter().find_map(|name| {
                let value = datum(module?.attrs.get(name)?)?;
                Some((name, value))
            });
            let path = candidate.path(of).unwrap_or(of);
            let Some((name, value)) = found else {
                if let Some(default) = default {
                    assumptions.push(Assumption {
                        about: axis.into(),
                        text: format!(
                            "{axis} is taken as {default}: `{path}` declares none of {}",
                            attr.join(", ")
                        ),
                    });
                }
                return Ok(default.clone());
            };
            let word = match &value {
                Datum::Text(w) => w.clone(),
                other => other.to_string(),
            };
            // Without a map the host's word is the axis value.
            let own = map.is_empty() && values.is_some_and(|v| v.contains_key(&word));
            match map.get(&word).or(own.then_some(&word)) {
                Some(value) => Ok(Some(value.clone())),
                None => Err((
                    foreign.clone().unwrap_or_else(|| code::AXIS_FOREIGN.into()),
                    format!("`{path}` declares {name} = {word}, which the structure does not have"),
                    word,
                )),
            }
        }
    }
}

/// The value of an axis whose rule asks only about the current role, and whether it is a fact. For seams without
/// the structure's other roles.
pub(crate) fn axis_by_role(rule: &AxisRule, facts: &Candidate<'_>) -> Option<(String, bool)> {
    match rule {
        AxisRule::Expr(e) if e.roles().iter().all(|r| r == "role") => {
            eval_text(e, facts).ok().map(|v| (v, !is_open(rule)))
        }
        _ => None,
    }
}

fn weights(
    spec: &Spec,
    slots: &Slots,
    wanted: &IndexMap<String, Role>,
    candidate: &Candidate<'_>,
    assumptions: &mut Vec<Assumption>,
) -> Result<IndexMap<String, SlotWeight>, (&'static str, String)> {
    let mut out = IndexMap::new();
    let mut solver = Solver::new(&candidate.dims);
    let declared_sources = spec.declared_sources();
    for (slot, source) in &slots.weights {
        let declared = declared_sources
            .iter()
            .find(|(s, _)| s.slot && s.name == *slot);
        let (role, param, layout, rows, reshape) = match source {
            WeightSource::Const(fill) => {
                out.insert(slot.clone(), SlotWeight::Const { fill: *fill });
                continue;
            }
            WeightSource::From {
                role,
                param,
                layout,
                rows,
                reshape,
            } => (role, param, *layout, rows, reshape),
        };
        let lookup = wanted.get(role);
        let hint = lookup.is_some_and(|r| r.in_parent);
        let stored = candidate.module(role).and_then(|m| m.params.get(param));
        let (Some(path), Some(info)) = (candidate.path(role), stored) else {
            let may =
                declared.is_none_or(|(_, needed)| !needed) || lookup.is_some_and(|r| r.optional);
            if may {
                continue;
            }
            let reason = format!("slot `{slot}` has no source: `{role}.{param}` is not there");
            return Err((code::SLOT_MISSING, reason));
        };
        let number = |e: &Expr| -> Result<usize, (&'static str, String)> {
            let broken = |why: String| {
                (
                    code::SLOTS_EXPRESSION,
                    format!("`{e}` of slot `{slot}`: {why}"),
                )
            };
            let n = eval_int(e, candidate).map_err(|e| broken(e.to_string()))?;
            usize::try_from(n).map_err(|_| broken(format!("it would be {n}")))
        };
        let rows = match rows {
            Some((a, b)) => Some((number(a)?, number(b)?)),
            None => None,
        };
        // A module that is stored inside another one is addressed there.
        let inside = candidate.tree.slices.get(path);
        if let Some(doubt) = inside.and_then(|s| s.doubt.as_ref()) {
            return Err((code::FUSED_ROWS, format!("slot `{slot}`: {doubt}")));
        }
        let rows = match (rows, inside) {
            (None, Some(whole)) => Some(whole.rows),
            (Some((a, b)), Some(whole)) => Some((whole.rows.0 + a, whole.rows.0 + b)),
            (rows, None) => rows,
        };
        let path = inside.map_or(path, |whole| whole.path.as_str());
        let stored = candidate.tree.get(path).and_then(|m| m.params.get(param));
        let info = stored.unwrap_or(info);
        let address = WeightAddress {
            path: path.into(),
            name: param.clone(),
            layout,
            // All rows is no range.
            rows: rows.filter(|r| Some(*r) != info.dims.first().map(|n| (0, *n))),
            reshape: match reshape {
                Some(dims) => Some(dims.iter().map(number).collect::<Result<_, _>>()?),
                None => None,
            },
            hint,
        };
        let dims = stored_dims(candidate.tree, &address);
        if let (Some((source, _)), Some(dims)) = (declared, dims) {
            if let Err(e) = solver.slot(source, &dims, layout) {
                // A norm beside the module that does not fit is not this module's norm.
                if hint {
                    continue;
                }
                let reason = format!(
                    "slot `{slot}` from {}: expected {}, found {}",
                    address.param(),
                    e.expected,
                    e.found
                );
                return Err((code::DIMS_INCONSISTENT, reason));
            }
        }
        if hint {
            assumptions.push(Assumption {
                about: slot.clone(),
                text: format!("{slot} is taken from `{}` beside it, by name", address.path),
            });
        }
        out.insert(slot.clone(), SlotWeight::Stored(address));
    }
    solver.finish().map_err(|e| {
        (
            code::DIMS_INCONSISTENT,
            format!("`{}`: expected {}, found {}", e.name, e.expected, e.found),
        )
    })?;
    Ok(out)
}

/// What operations that repeat over slots of several modules take for granted: that one tensor goes into all of them.
/// Rows of one parameter need no such word.
fn shared_input(spec: &Spec, weights: &IndexMap<String, SlotWeight>) -> Option<Assumption> {
    let op = spec.dataflow.ops.iter().find(|op| {
        let slot = op.inputs.iter().any(|name| name.contains('<'));
        op.repeat.is_some() && op.refuse.is_some() && slot
    })?;
    let inputs = &spec.inputs;
    let input = op
        .inputs
        .iter()
        .find(|name| inputs.iter().any(|port| port.name == **name))?;
    let stored = weights.values().filter_map(SlotWeight::stored);
    let mut paths: Vec<&str> = stored.map(|a| a.path.as_str()).collect();
    paths.dedup();
    let [first, rest @ ..] = paths.as_slice() else {
        return None;
    };
    let others: Vec<String> = rest
        .iter()
        .filter(|p| *p != first)
        .map(|p| format!("`{p}`"))
        .collect();
    (!others.is_empty()).then(|| Assumption {
        about: input.clone(),
        text: format!(
            "`{first}` and {} are taken to read one tensor `{input}`: only a graph says whether they do",
            others.join(", ")
        ),
    })
}

/// Dims of a stored weight as its slot reads it.
pub(crate) fn stored_dims(tree: &ModuleTree, address: &WeightAddress) -> Option<Vec<usize>> {
    let info = tree.get(&address.path)?.params.get(&address.name)?;
    if let Some(dims) = &address.reshape {
        return Some(dims.clone());
    }
    let mut dims = info.dims.clone();
    if let (Some((from, to)), Some(first)) = (address.rows, dims.first_mut()) {
        *first = to.saturating_sub(from);
    }
    Some(dims)
}
