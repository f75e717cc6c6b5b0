//! Checks that need several parts of a document: every name resolves, whatever axes and repeats are chosen.
//!
//! Runs once, at load. What it lets through expands under every combination of host axes.

use std::collections::{BTreeMap, BTreeSet};

use crate::document::{Fields, Node};
use crate::error::CatalogError;
use crate::expr::Expr;
use crate::names;
use crate::spec::{AttrDecl, AxisRule, DimExpr, OpDecl, Plain, Slots, Spec, WeightSource};

/// Most combinations of host axes and repeat counts.
pub(crate) const MAX_COMBINATIONS: usize = 64;
/// Most operations over all combinations, repeats written out: what a document may cost in memory.
const MAX_EXPANDED: usize = 32_768;
/// Most spans.
const MAX_SPANS: usize = 64;

pub(crate) fn check(spec: &Spec, doc: &Fields) -> Result<(), CatalogError> {
    let v = Validator { spec, doc };
    v.combinations()?;
    v.sources()?;
    v.dims()?;
    v.symbols()?;
    v.constraints()?;
    v.axes_of_ops()?;
    let full = v.expansions()?;
    let names = v.names_of_ops();
    v.occurrences(&names)?;
    v.spans(&names, &full)?;
    match &spec.slots {
        Some(slots) => v.slots(slots)?,
        None if spec.dataflow.ops.iter().any(|o| o.anchor) => {}
        None => {
            let at = doc.find(&["slots", "at"]);
            return Err(at.invalid("`at: graph` needs an op marked `anchor: true`"));
        }
    }
    for (slot, _) in &spec.qualification.min_elements {
        if !v.slot_names().contains(slot) {
            let at = doc.find(&["qualification", "min_elements", slot]);
            return Err(at.invalid(format!("`{slot}` is no slot of this entry")));
        }
    }
    Ok(())
}

/// Names that operations read, and names they make.
type Names = (BTreeSet<String>, BTreeSet<String>);

struct Validator<'a> {
    spec: &'a Spec,
    doc: &'a Fields<'a>,
}

impl<'a> Validator<'a> {
    fn slot_names(&self) -> Vec<String> {
        let slots = self.spec.weights.iter();
        slots
            .flat_map(|s| names::expanded(&s.name, s.repeat))
            .collect()
    }

    fn op_node(&self, at: usize) -> Node<'a> {
        self.doc.find(&["dataflow", "ops", &format!("[{at}]")])
    }

    fn combinations(&self) -> Result<(), CatalogError> {
        let mut n = 1usize;
        for axis in self.spec.variants.values().filter(|a| a.host) {
            n = n.saturating_mul(axis.values.len());
        }
        let mut counts: BTreeSet<(usize, usize, usize)> = BTreeSet::new();
        for s in &self.spec.weights {
            counts.extend(s.repeat.map(|(a, b)| (a, b, s.least)));
        }
        for (a, b, least) in counts.iter().filter(|(_, _, least)| *least > 0) {
            n = n.saturating_mul(b - a - least + 1);
        }
        if n > MAX_COMBINATIONS {
            let at = self.doc.find(&["variants"]);
            return Err(at.invalid(format!(
                "{n} combinations of host axes and counts, expected at most {MAX_COMBINATIONS}"
            )));
        }
        let each = |o: &OpDecl| o.repeat.as_ref().map_or(1, |(_, values)| values.len());
        let ops: usize = self.spec.dataflow.ops.iter().map(each).sum();
        if n.max(1).saturating_mul(ops) > MAX_EXPANDED {
            let at = self.doc.find(&["dataflow", "ops"]);
            return Err(at.invalid(format!(
                "{ops} operations in each of {n} combinations, expected at most {MAX_EXPANDED} in all"
            )));
        }
        let spans = self.spec.dataflow.spans.len();
        if spans > MAX_SPANS {
            let at = self.doc.find(&["dataflow", "spans"]);
            return Err(at.invalid(format!("{spans} spans, expected at most {MAX_SPANS}")));
        }
        Ok(())
    }

    fn sources(&self) -> Result<(), CatalogError> {
        let mut seen = BTreeSet::new();
        for (source, _) in self.spec.declared_sources() {
            if !seen.insert(source.name.clone()) {
                let part = if source.slot { "weights" } else { "boundary" };
                let at = self.doc.find(&[part, &source.name]);
                return Err(at.invalid(format!("`{}` is declared twice", source.name)));
            }
        }
        if let Some(i) = self.spec.inputs.iter().position(|p| p.value != p.name) {
            let at = self.doc.find(&["boundary", "inputs", &format!("[{i}]")]);
            let found = &self.spec.inputs[i].value;
            return Err(at.invalid(format!("an input is its own value, found `{found}`")));
        }
        Ok(())
    }

    // Symbols that a size binds: of a tensor, or of a param.
    fn bound_symbols(&self) -> BTreeSet<&str> {
        let inputs = self.spec.inputs.iter();
        let inputs = inputs.flat_map(|p| std::iter::once(&p.dims).chain(&p.more));
        inputs
            .chain(self.spec.weights.iter().map(|s| &s.dims))
            .flatten()
            .filter_map(|d| match d {
                DimExpr::Symbol(s) => Some(s.as_str()),
                _ => None,
            })
            .chain(self.spec.symbols.keys().map(String::as_str))
            .collect()
    }

    // Derived dims, dims of outputs and views, and computed attributes are made of symbols that a size binds.
    fn dims(&self) -> Result<(), CatalogError> {
        let bound = self.bound_symbols();
        let known =
            |free: &[String], at: &Node| match free.iter().find(|s| !bound.contains(s.as_str())) {
                Some(s) => Err(at.invalid(format!("nothing gives `{s}` a size"))),
                None => Ok(()),
            };
        let check =
            |dims: &[DimExpr], at: Node| dims.iter().try_for_each(|d| known(&d.symbols(), &at));
        for s in &self.spec.weights {
            check(&s.dims, self.doc.find(&["weights", &s.name]))?;
        }
        for (side, ports) in [
            ("inputs", &self.spec.inputs),
            ("outputs", &self.spec.outputs),
        ] {
            for (i, p) in ports.iter().enumerate() {
                let at = self
                    .doc
                    .find(&["boundary", side, &format!("[{i}]"), "dims"]);
                if side == "outputs" && !p.more.is_empty() {
                    return Err(
                        at.invalid("an output has one list of dims; inputs may have alternatives")
                    );
                }
                for dims in std::iter::once(&p.dims).chain(&p.more) {
                    check(dims, at.clone())?;
                }
            }
        }
        for (i, op) in self.spec.dataflow.ops.iter().enumerate() {
            for view in op.views.iter().flatten() {
                let at = self.op_node(i).find(&["dims"]);
                let written = |d: &DimExpr| -> Vec<String> {
                    let named = d.symbols().into_iter();
                    named.flat_map(|s| self.indexed(op, &s)).collect()
                };
                view.iter().try_for_each(|d| known(&written(d), &at))?;
            }
            for (name, attr) in &op.attrs {
                if let AttrDecl::Dims(dims) = attr {
                    let at = self.op_node(i).find(&["attrs", name]);
                    let all = dims.exprs().iter();
                    all.clone().try_for_each(|e| known(&e.symbols(), &at))?;
                    if let Some(e) = all.clone().find(|e| !self.is_arithmetic(e)) {
                        return Err(at.invalid(format!("`{e}` is no arithmetic over dim symbols")));
                    }
                }
            }
        }
        Ok(())
    }

    // A symbol of an op with its index written out; axes stay, they are no part of a symbol.
    fn indexed(&self, op: &OpDecl, symbol: &str) -> Vec<String> {
        match &op.repeat {
            Some((index, values)) if symbol.contains('<') => values
                .iter()
                .filter_map(|v| names::substitute(symbol, &|n| (n == index).then(|| v.clone())))
                .collect(),
            _ => vec![symbol.into()],
        }
    }

    // No facts of roles, no words.
    fn is_arithmetic(&self, e: &Expr) -> bool {
        let mut plain = true;
        e.walk(&mut |part| {
            plain &= matches!(
                part,
                Expr::Int(_) | Expr::Symbol(_) | Expr::Binary(..) | Expr::Unary(..) | Expr::If(..)
            )
        });
        plain
    }

    fn captured(&self) -> BTreeSet<&str> {
        let attrs = self.spec.dataflow.ops.iter().flat_map(|o| o.attrs.values());
        attrs
            .filter_map(|a| match a {
                AttrDecl::Capture(param) => Some(param.as_str()),
                _ => None,
            })
            .chain(self.spec.symbols.values().map(String::as_str))
            .collect()
    }

    // A symbol that is a param occurs somewhere.
    fn symbols(&self) -> Result<(), CatalogError> {
        let mut used: BTreeSet<String> = BTreeSet::new();
        let ports = self.spec.inputs.iter().chain(&self.spec.outputs);
        let dims = ports
            .flat_map(|p| std::iter::once(&p.dims).chain(&p.more))
            .chain(self.spec.weights.iter().map(|s| &s.dims));
        used.extend(dims.flatten().flat_map(DimExpr::symbols));
        for op in &self.spec.dataflow.ops {
            used.extend(
                op.views
                    .iter()
                    .flatten()
                    .flatten()
                    .flat_map(DimExpr::symbols),
            );
            for attr in op.attrs.values() {
                if let AttrDecl::Dims(d) = attr {
                    used.extend(d.exprs().iter().flat_map(Expr::symbols));
                }
            }
        }
        for c in &self.spec.constraints {
            used.extend(c.that.symbols());
        }
        for (symbol, param) in &self.spec.symbols {
            let at = self.doc.find(&["symbols", symbol]);
            if !used.contains(symbol) {
                return Err(at.invalid(format!("no dim and no expression uses `{symbol}`")));
            }
            if param != symbol && self.bound_symbols().contains(param.as_str()) {
                return Err(at.invalid(format!(
                    "`{param}` is a dim symbol; a param has its own name"
                )));
            }
            let tensors = self.spec.declared_sources();
            if tensors.iter().any(|(s, _)| s.name == *param) {
                return Err(at.invalid(format!("`{param}` is a tensor of this entry")));
            }
        }
        Ok(())
    }

    fn constraints(&self) -> Result<(), CatalogError> {
        let (bound, params) = (self.bound_symbols(), self.captured());
        let sources = self.spec.declared_sources();
        for (i, c) in self.spec.constraints.iter().enumerate() {
            let node = self.doc.find(&["constraints", &format!("[{i}]")]);
            let at = node.find(&["that"]);
            let known = |n: &str| bound.contains(n) || params.contains(n);
            if let Some(s) = c.that.symbols().iter().find(|s| !known(s)) {
                return Err(at.invalid(format!(
                    "`{s}` is neither a dim symbol nor a captured param"
                )));
            }
            let mut wrong = None;
            c.that.walk(&mut |e| match e {
                Expr::Has(n) if known(n) || sources.iter().any(|(s, _)| s.name == *n) => {}
                Expr::Has(n) => {
                    wrong.get_or_insert(format!(
                        "`{n}` is no dim symbol, param, input or slot of this entry"
                    ));
                }
                Expr::Conditioned(_)
                | Expr::Fact(..)
                | Expr::ParamDim(..)
                | Expr::ParamCount(..)
                | Expr::Attr(..) => {
                    wrong.get_or_insert(format!(
                        "`{e}` asks a module; a constraint knows sizes and params only"
                    ));
                }
                _ => {}
            });
            if let Some(what) = wrong {
                return Err(at.invalid(what));
            }
            self.when(&c.when, &node)?;
        }
        Ok(())
    }

    // Axes and values of a `when`.
    fn when(&self, when: &BTreeMap<String, Vec<String>>, node: &Node) -> Result<(), CatalogError> {
        for (axis, values) in when {
            let at = node.find(&["when", axis]);
            self.host_axis(axis, &at)?;
            let known = &self.spec.variants[axis].values;
            if let Some(v) = values.iter().find(|v| !known.contains_key(*v)) {
                return Err(at.invalid(format!("`{v}` is no value of `{axis}`")));
            }
        }
        Ok(())
    }

    fn host_axis(&self, name: &str, at: &Node) -> Result<(), CatalogError> {
        match self.spec.variants.get(name) {
            Some(a) if a.host => Ok(()),
            Some(_) => Err(at.invalid(format!(
                "`{name}` is a choice of the form; the dataflow may depend on host axes only"
            ))),
            None => Err(at.invalid(format!("`{name}` is no variant axis"))),
        }
    }

    fn axes_of_ops(&self) -> Result<(), CatalogError> {
        let sources = self.spec.declared_sources();
        for (i, op) in self.spec.dataflow.ops.iter().enumerate() {
            let node = self.op_node(i);
            self.when(&op.when, &node)?;
            for (name, attr) in &op.attrs {
                if let AttrDecl::Axis(axis) = attr {
                    self.host_axis(axis, &node.find(&["attrs", name]))?;
                }
            }
            if let Some((index, _)) = &op.repeat {
                if self.spec.variants.contains_key(index) {
                    let at = node.find(&["for"]);
                    return Err(at.invalid(format!("`{index}` is also a variant axis")));
                }
            }
            for need in &op.needs {
                let mut meant: Vec<String> = vec![need.clone()];
                if let Some((index, values)) = &op.repeat {
                    let value = |v: &String, n: &str| (n == index).then(|| v.clone());
                    let each = values.iter();
                    meant = each
                        .filter_map(|v| names::substitute(need, &|n| value(v, n)))
                        .collect();
                }
                let known = |n: &String| {
                    let mut all = sources.iter();
                    all.any(|(s, must)| s.name == *n && (s.optional || !must))
                };
                if !meant.iter().any(known) {
                    let at = node.find(&["needs"]);
                    return Err(at.invalid(format!("`{need}` is no optional slot or input")));
                }
            }
        }
        Ok(())
    }

    // Everything expands with all optionals there, and with none. Gives those with all.
    fn expansions(&self) -> Result<Vec<Plain>, CatalogError> {
        let mut full = Vec::new();
        for axes in self.spec.host_axis_combinations() {
            for all in [true, false] {
                match self.spec.expand(&axes, &|_| all) {
                    Ok(plain) if all => full.push(plain),
                    Ok(_) => {}
                    Err(CatalogError::Dataflow { value, reason, .. }) => {
                        return Err(self.node_of(&value).invalid(format!("`{value}`: {reason}")))
                    }
                    // An optional that this combination needs.
                    Err(CatalogError::MissingInput { .. } | CatalogError::MissingWeight { .. })
                        if !all => {}
                    Err(e) => return Err(e),
                }
            }
        }
        Ok(full)
    }

    // The last op that makes the value (the culprit of a second definition), else the first that reads it.
    fn node_of(&self, value: &str) -> Node<'a> {
        let value = value.split(", ").next().unwrap_or(value);
        let ops = &self.spec.dataflow.ops;
        let combinations = self.spec.host_axis_combinations();
        let is = |n: &String| {
            n == value
                || combinations
                    .iter()
                    .any(|axes| self.spec.written_out(n, axes).iter().any(|w| w == value))
        };
        let makes = ops.iter().rposition(|o| o.lets.iter().any(is));
        let reads = ops.iter().position(|o| o.inputs.iter().any(is));
        match makes.or(reads) {
            Some(i) => self.op_node(i),
            None => self.doc.find(&["dataflow", "ops"]),
        }
    }

    // Names read and made in any combination, written out.
    fn names_of_ops(&self) -> Names {
        let (mut read, mut made) = (BTreeSet::new(), BTreeSet::new());
        for axes in self.spec.host_axis_combinations() {
            for op in &self.spec.dataflow.ops {
                let indices: Vec<Option<&str>> = match &op.repeat {
                    None => vec![None],
                    Some((_, values)) => values.iter().map(|v| Some(v.as_str())).collect(),
                };
                for index in indices {
                    let value = |n: &str| match (&op.repeat, index) {
                        (Some((i, _)), Some(v)) if i == n => Some(v.to_string()),
                        _ => axes.get(n).cloned(),
                    };
                    let all = |list: &[String]| -> Vec<String> {
                        list.iter()
                            .filter_map(|n| names::substitute(n, &value))
                            .collect()
                    };
                    read.extend(all(&op.inputs));
                    made.extend(all(&op.lets));
                }
            }
        }
        (read, made)
    }

    fn occurrences(&self, (read, made): &Names) -> Result<(), CatalogError> {
        for (i, p) in self.spec.inputs.iter().enumerate() {
            for name in names::expanded(&p.value, p.repeat) {
                let passed = self.spec.outputs.iter().any(|o| o.value == name);
                if !read.contains(&name) && !passed {
                    let at = self.doc.find(&["boundary", "inputs", &format!("[{i}]")]);
                    return Err(at.invalid(format!("input `{name}` is read by no op")));
                }
            }
        }
        for (i, p) in self.spec.outputs.iter().enumerate() {
            for name in names::expanded(&p.value, p.repeat) {
                // An input may be handed through.
                let passed = self.spec.inputs.iter().any(|p| p.name == name);
                if !made.contains(&name) && !passed {
                    let at = self.doc.find(&["boundary", "outputs", &format!("[{i}]")]);
                    let what = format!("output value `{name}` is made by no op");
                    return Err(at.invalid(what));
                }
            }
        }
        for s in &self.spec.weights {
            for name in names::expanded(&s.name, s.repeat) {
                if !read.contains(&name) {
                    let at = self.doc.find(&["weights", &s.name]);
                    return Err(at.invalid(format!("slot `{name}` is read by no op")));
                }
            }
        }
        for (i, point) in self.spec.points.iter().enumerate() {
            for name in self.everywhere(point) {
                if !made.contains(&name) && !read.contains(&name) {
                    let at = self.doc.find(&["points", &format!("[{i}]")]);
                    return Err(at.invalid(format!("point `{name}` is no value of the dataflow")));
                }
            }
        }
        for (i, point) in self.spec.content.iter().enumerate() {
            if !self.spec.points.contains(point) {
                let at = self.doc.find(&["content", &format!("[{i}]")]);
                return Err(at.invalid(format!("`{point}` is none of `points`")));
            }
        }
        Ok(())
    }

    // What a name stands for under any axes; itself when it stands for nothing.
    fn everywhere(&self, name: &str) -> BTreeSet<String> {
        let axes = self.spec.host_axis_combinations();
        let mut all: BTreeSet<String> = axes
            .iter()
            .flat_map(|a| self.spec.written_out(name, a))
            .collect();
        if all.is_empty() {
            all.insert(name.into());
        }
        all
    }

    fn spans(&self, (_, made): &Names, full: &[Plain]) -> Result<(), CatalogError> {
        let sources = self.spec.declared_sources();
        let is_input = |n: &String| sources.iter().any(|(s, _)| !s.slot && s.name == *n);
        for span in &self.spec.dataflow.spans {
            let node = self.doc.find(&["dataflow", "spans", &span.name]);
            for (side, list) in [("in", &span.inputs), ("out", &span.outputs)] {
                for (i, declared) in list.iter().enumerate() {
                    for name in self.everywhere(declared) {
                        let known = made.contains(&name) || side == "in" && is_input(&name);
                        if !known {
                            let at = node.find(&[side, &format!("[{i}]")]);
                            let what = match side {
                                "in" => "is neither an input nor a value of the dataflow",
                                _ => "is made by no op",
                            };
                            return Err(at.invalid(format!("`{name}` {what}")));
                        }
                    }
                }
            }
        }
        for plain in full {
            for span in &plain.spans {
                for op in plain.span_ops(span) {
                    let inputs = plain.ops[op].inputs.iter().flatten();
                    let open = inputs
                        .filter(|n| plain.source(n).is_some_and(|s| !s.slot))
                        .find(|n| !span.inputs.contains(n));
                    if let Some(open) = open {
                        let at = self.doc.find(&["dataflow", "spans", &span.name, "in"]);
                        return Err(at.invalid(format!(
                            "the span reads the input `{open}`, which is not listed"
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    fn slots(&self, slots: &Slots) -> Result<(), CatalogError> {
        let node = self.doc.find(&["slots"]);
        let declared: BTreeSet<&str> = slots
            .any
            .iter()
            .flat_map(|roles| roles.keys())
            .map(String::as_str)
            .collect();
        let known = |role: &str| {
            declared.contains(role)
                || role == "self"
                || role == "parent"
                || role == "role" && !slots.emit.per.is_empty()
        };
        let role = |role: &str, at: &Node| match known(role) {
            true => Ok(()),
            false => Err(at.invalid(format!("`{role}` is no role of this entry"))),
        };
        let expr = |e: &Expr, at: &Node| {
            e.roles().iter().try_for_each(|r| role(r, at))?;
            match e.symbols().iter().find(|s| !slots.dims.contains_key(*s)) {
                Some(s) => Err(at.invalid(format!("`{s}` is no symbol of `dims`"))),
                None => Ok(()),
            }
        };
        for (i, c) in slots.checks.iter().enumerate() {
            expr(&c.that, &node.find(&["checks", &format!("[{i}]"), "that"]))?;
        }
        for (symbol, e) in &slots.dims {
            expr(e, &node.find(&["dims", symbol]))?;
        }
        for (axis, rule) in &slots.axis {
            let at = node.find(&["axis", axis]);
            let Some(declared) = self.spec.variants.get(axis) else {
                return Err(at.invalid(format!("`{axis}` is no variant axis")));
            };
            let value = |v: &String| match declared.values.contains_key(v) {
                true => Ok(()),
                false => Err(at.invalid(format!("`{v}` is no value of `{axis}`"))),
            };
            match rule {
                AxisRule::Expr(e) => {
                    expr(e, &at)?;
                    results(e).iter().try_for_each(value)?;
                }
                AxisRule::Attr {
                    of, map, default, ..
                } => {
                    role(of, &at)?;
                    map.values().chain(default).try_for_each(value)?;
                }
            }
        }
        for (slot, source) in &slots.weights {
            if let WeightSource::From {
                role: r,
                rows,
                reshape,
                ..
            } = source
            {
                let at = node.find(&["weights", slot]);
                role(r, &at)?;
                for e in rows
                    .iter()
                    .flat_map(|(a, b)| [a, b])
                    .chain(reshape.iter().flatten())
                {
                    expr(e, &at)?;
                }
            }
        }
        for (source, must) in self.spec.declared_sources() {
            if source.slot && must && !slots.weights.contains_key(&source.name) {
                let at = node.find(&["weights"]);
                return Err(
                    at.invalid(format!("the required slot `{}` has no source", source.name))
                );
            }
        }
        let emit = node.find(&["emit"]);
        role(&slots.emit.path, &emit.find(&["path"]))?;
        role(&slots.emit.parent, &emit.find(&["parent"]))?;
        slots
            .emit
            .per
            .iter()
            .try_for_each(|r| role(r, &emit.find(&["per"])))
    }
}

// Words an axis expression can give, as far as they are written.
fn results(e: &Expr) -> Vec<String> {
    match e {
        Expr::Text(s) => vec![s.clone()],
        Expr::If(_, a, b) => [results(a), results(b)].concat(),
        _ => Vec::new(),
    }
}
