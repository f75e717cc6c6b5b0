//! Which pairs of bound forms may be wired: facts of the dataflow graph, and nothing about any structure.
//!
//! A producer's form says which output it can send in a format, a consumer's which input it can take. They are a pair
//! where that input *is* that output: the same tensor, read by nobody else, with nothing between but a view that keeps
//! the order of values. Everything else that looks like a pair is refused with the edge named.
//!
//! Does not own: whether a pair is worth it (`attach` judges it), nor how it is bound ([`crate::bind`]).

use structures_graph::{AttrValue, Dim, Graph, OpId, OpKind, ValueId};
use structures_seams::HostFacts;

use crate::sites::Site;

/// Median rows up to which a pair is formed.
pub const MOST_ROWS: u64 = 256;
/// A structure with one of these tags owns the block it lies on; only there is a wire consumed.
pub const OWNERS: [&str; 2] = ["block", "chain"];
/// A structure with this tag is what wires compose, and binds nothing beside them.
pub const COMPOSED: &str = "chain";

/// Another operation reads what would be sent.
pub const SECOND_READER: &str = "wire_second_reader";
/// Something other than a view lies between.
pub const NOT_DIRECT: &str = "wire_not_direct";
/// No structure owns the block of both.
pub const NO_OWNER: &str = "wire_no_owner";
/// The scale is not known, or there are too many rows.
pub const UNQUALIFIED: &str = "wire_unqualified";
/// What came over the wire was not what the host makes.
pub const PAIR_SMOKE: &str = "pair_smoke";

/// One end: a site, the span its form would take, and the value at its port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Index of the site.
    pub site: usize,
    /// Index of the span.
    pub span: usize,
    /// Name of the port in the structure.
    pub port: String,
    /// The host value there.
    pub value: ValueId,
}

/// Two ends of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// Who makes it.
    pub producer: End,
    /// Who reads it.
    pub consumer: End,
    /// Views between, which the chain takes along.
    pub views: Vec<OpId>,
}

/// Why two ends are no pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Who makes the tensor.
    pub producer: usize,
    /// Who reads it, or what is made of it.
    pub consumer: usize,
    /// Code.
    pub code: &'static str,
    /// The edge, by names.
    pub reason: String,
}

/// How two ends lie to each other; `None` when they have nothing to do with each other.
pub fn edge(
    facts: &HostFacts<'_>,
    sites: &[Site<'_>],
    producer: &End,
    consumer: &End,
) -> Option<Result<Edge, Broken>> {
    let graph = facts.graph();
    let broken = |code, reason| {
        Some(Err(Broken {
            producer: producer.site,
            consumer: consumer.site,
            code,
            reason,
        }))
    };
    let name = |v: ValueId| &graph.value(v).name;
    let (from, to) = (producer.value, consumer.value);
    if producer.site == consumer.site {
        return None;
    }
    if !facts.same_tensor(from, to) {
        // One step away it is worth a word.
        let (op, _) = graph.producer(facts.tensor(to))?;
        let reads = |v: &ValueId| facts.same_tensor(*v, from);
        graph.op(op).inputs.iter().flatten().find(|v| reads(v))?;
        return broken(
            NOT_DIRECT,
            format!(
                "between `{}` and `{}` lies {} `{}`",
                name(from),
                name(to),
                graph.op(op).kind,
                name(graph.op(op).outputs[0])
            ),
        );
    }
    let inside = &sites[consumer.site].spans[consumer.span];
    let outside = facts
        .readers(from)
        .iter()
        .find(|r| !inside.ops.contains(&r.op));
    if let Some(reader) = outside {
        return broken(
            SECOND_READER,
            format!(
                "`{}` is read by {} `{}` as well, which would find codes",
                name(from),
                graph.op(reader.op).kind,
                graph
                    .op(reader.op)
                    .outputs
                    .first()
                    .map_or("?", |v| name(*v).as_str())
            ),
        );
    }
    if let Some(output) = facts.output_names(from).first() {
        return broken(
            SECOND_READER,
            format!("`{}` is returned as `{output}`", name(from)),
        );
    }
    let twice = inside.inputs.iter().filter_map(|(n, v)| Some((n, (*v)?)));
    let twice = twice
        .filter(|(_, v)| facts.same_tensor(*v, from))
        .find(|(n, _)| **n != consumer.port);
    if let Some((other, _)) = twice {
        return broken(
            SECOND_READER,
            format!(
                "`{}` is input `{other}` of the same span as well",
                name(from)
            ),
        );
    }
    match views(graph, from, to) {
        Ok(views) => Some(Ok(Edge {
            producer: producer.clone(),
            consumer: consumer.clone(),
            views,
        })),
        Err(op) => broken(
            NOT_DIRECT,
            format!(
                "between `{}` and `{}` lies {} `{}`, which moves values",
                name(from),
                name(to),
                graph.op(op).kind,
                name(graph.op(op).outputs[0])
            ),
        ),
    }
}

/// The views from one value to the other, or the first that does more than group rows.
fn views(graph: &Graph, from: ValueId, to: ValueId) -> Result<Vec<OpId>, OpId> {
    let width = |v: ValueId| graph.value(v).dims.last().cloned();
    let mut found = Vec::new();
    let mut at = to;
    while at != from {
        let Some((op, _)) = graph.producer(at) else {
            break;
        };
        let o = graph.op(op);
        let Some(Some(before)) = o.inputs.first().copied() else {
            break;
        };
        let keeps = matches!(o.kind, OpKind::Reshape | OpKind::Contiguous)
            && matches!(width(at), Some(Dim::Size(_)))
            && width(at) == width(before)
            && o.attrs.values().all(|a| !matches!(a, AttrValue::Float(_)));
        if !keeps {
            return Err(op);
        }
        found.push(op);
        at = before;
    }
    found.reverse();
    Ok(found)
}

/// The site whose module holds both, among those that own blocks.
pub fn owner<'s>(sites: &'s [Site<'_>], edge: &Edge) -> Option<&'s str> {
    let holds = |path: &str, inner: &str| {
        inner
            .strip_prefix(path)
            .is_some_and(|rest| rest.starts_with('.') || rest.is_empty())
    };
    let both = [edge.producer.site, edge.consumer.site].map(|i| sites[i].seam.path.as_str());
    sites
        .iter()
        .filter(|s| {
            OWNERS
                .iter()
                .any(|tag| s.spec.tags.iter().any(|t| t == tag))
        })
        .find(|s| both.iter().all(|path| holds(&s.seam.path, path)))
        .map(|s| s.seam.path.as_str())
}
