//! `layout`: the same tensors lying differently give the same numbers, or a refusal where a form may refuse.
//!
//! Every form must take weights with any strides and every tensor that is aligned to its element and no more. Rows
//! with gaps between them, and addresses that are not even aligned to the element, may be refused. Numbers are
//! compared with the form's own on the plain layout.

use structures_loader::{BoundForm, HostTensor, RawBind};
use structures_plugin_api::abi::{Contract, TensorView};
use structures_suite::judge::{Judge, Made};
use structures_suite::SuiteError;

use super::{alike, band, call, once, parity, poisoned, rooms, Bench, Verdict};
use crate::code::Code;
use crate::room::{Lay, Room};

/// One way to lie.
struct Way {
    name: &'static str,
    weights: Lay,
    inputs: Lay,
    outputs: Lay,
    /// No form may refuse it.
    due: bool,
}

impl Way {
    /// Whether something lies at an address that its type is not aligned for, which no checked view can say.
    fn odd(&self) -> bool {
        [self.weights, self.inputs, self.outputs].contains(&ODD)
    }
}

const PLAIN: Lay = Lay {
    offset: 0,
    gap: 0,
    turned: false,
};
const TURNED: Lay = Lay {
    turned: true,
    ..PLAIN
};
const GAPS: Lay = Lay { gap: 3, ..PLAIN };
/// Off a vector's boundary, by a whole number of elements of any type.
const ELEMENT: Lay = Lay { offset: 8, ..PLAIN };
const ODD: Lay = Lay { offset: 1, ..PLAIN };

/// Cases beside the usual one that are bound with weights the other way round.
const CASES: usize = 12;

const WAYS: &[Way] = &[
    Way {
        name: "weights stored the other way round",
        weights: TURNED,
        inputs: PLAIN,
        outputs: PLAIN,
        due: true,
    },
    Way {
        name: "weights as rows of a wider buffer",
        weights: GAPS,
        inputs: PLAIN,
        outputs: PLAIN,
        due: true,
    },
    Way {
        name: "weights aligned to their element",
        weights: ELEMENT,
        inputs: PLAIN,
        outputs: PLAIN,
        due: true,
    },
    Way {
        name: "inputs aligned to their element",
        weights: PLAIN,
        inputs: ELEMENT,
        outputs: PLAIN,
        due: true,
    },
    Way {
        name: "outputs aligned to their element",
        weights: PLAIN,
        inputs: PLAIN,
        outputs: ELEMENT,
        due: true,
    },
    Way {
        name: "inputs as rows of a wider buffer",
        weights: PLAIN,
        inputs: GAPS,
        outputs: PLAIN,
        due: false,
    },
    Way {
        name: "outputs as rows of a wider buffer",
        weights: PLAIN,
        inputs: PLAIN,
        outputs: GAPS,
        due: false,
    },
    Way {
        name: "weights at an odd address",
        weights: ODD,
        inputs: PLAIN,
        outputs: PLAIN,
        due: false,
    },
    Way {
        name: "inputs at an odd address",
        weights: PLAIN,
        inputs: ODD,
        outputs: PLAIN,
        due: false,
    },
    Way {
        name: "outputs at an odd address",
        weights: PLAIN,
        inputs: PLAIN,
        outputs: ODD,
        due: false,
    },
];

pub(super) fn run(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let case = bench.case;
    let Ok(plain) = once(bench, case) else {
        return Ok(Verdict::Skipped("the usual case does not run".into()));
    };
    let watched = plain.iter().all(|room| room.touched().is_none());
    let mut refused = Vec::new();
    // Memory of a device is the plugin's own to lay out; nothing odd can be put there.
    let on_device = bench.device() != 0;
    let only = bench.cx.task.only;
    let numbered = WAYS.iter().zip(bench.cx.task.seed..);
    for (way, seed) in numbered.filter(|(_, seed)| only.is_none_or(|only| only == *seed)) {
        bench.at(way.name, Some(seed));
        if way.odd() && on_device {
            refused.push(way.name);
            continue;
        }
        match lie(bench, way) {
            Ok(outputs) => {
                if let Some(at) = outputs.iter().find_map(Room::touched).filter(|_| watched) {
                    let text = format!("{}: wrote {at} bytes from its first element", way.name);
                    return Ok(Code::WrittenBeyond.at(seed, text));
                }
                if let Err(reason) = alike(&plain, &outputs, bench.slack()) {
                    return Ok(Code::LayoutWrong.at(seed, format!("{}: {reason}", way.name)));
                }
            }
            Err(reason) if way.due => {
                return Ok(Code::LayoutRefused.at(seed, format!("{}: {reason}", way.name)));
            }
            Err(_) => refused.push(way.name),
        }
    }
    let after = bench.cx.task.seed + WAYS.len() as u64;
    let cases = parity::cases(bench)?.into_iter();
    let moved: Vec<_> = cases
        .map(|(seed, v, draft)| (seed + after, v, draft))
        .collect();
    for (seed, version, draft) in parity::chosen(bench, moved, CASES) {
        bench.at(
            &format!("{}, weights stored the other way round", draft.name),
            Some(seed),
        );
        let Ok(spec) = bench.cx.catalog.get_version(&bench.form.structure, version) else {
            continue;
        };
        let Made::Ready(case) = Judge::new(spec, bench.form, &draft).prepare(seed, false)? else {
            continue;
        };
        if band::is_edge(bench.form, case.shapes()) {
            continue;
        }
        let Ok(plain) = once(bench, &case) else {
            continue;
        };
        let mut request = case.request().clone();
        request
            .weights
            .iter_mut()
            .for_each(|(_, w)| *w = w.clone().swapped());
        let bound = bench.bind_as(&request);
        let inputs = rooms(&case.inputs(), PLAIN);
        let mut outputs = poisoned(&case, PLAIN);
        if let Err(e) = bound.and_then(|bound| call(&bound, &inputs, &mut outputs)) {
            return Ok(Code::LayoutRefused.at(seed, format!("{}, weights turned: {e}", draft.name)));
        }
        if let Err(reason) = alike(&plain, &outputs, bench.slack()) {
            return Ok(
                Code::LayoutWrong.at(seed, format!("{}, weights turned: {reason}", draft.name))
            );
        }
    }
    Ok(Verdict::passed(match refused.is_empty() {
        true => format!("{} layouts served", WAYS.len()),
        false => format!("refused, as it may: {}", refused.join(", ")),
    }))
}

fn lie(bench: &Bench<'_>, way: &Way) -> Result<Vec<Room>, String> {
    let case = bench.case;
    let mut outputs = poisoned(case, way.outputs);
    let mut inputs = rooms(&case.inputs(), way.inputs);
    let weights = case.request().weights.iter();
    let mut weights: Vec<(String, Room)> = weights
        .map(|(name, w)| (name.clone(), Room::of(w, way.weights)))
        .collect();
    let views = weights
        .iter()
        .filter(|_| way.weights != ODD)
        .map(|(name, room)| Ok((name.as_str(), room.view()?)));
    let views: Result<Vec<(&str, HostTensor<'_>)>, structures_loader::LoaderError> =
        views.collect();
    let views = views.map_err(|e| e.to_string())?;
    if !way.odd() {
        let bound = bench.cx.loaded.bind_views(case.request(), &views);
        let bound = bound.map_err(|e| e.to_string())?;
        // What was packed is the form's own now.
        drop(weights);
        call(&bound, &inputs, &mut outputs).map_err(|e| e.to_string())?;
        return Ok(outputs);
    }
    let bound = match way.weights {
        ODD => {
            drop(views);
            bind_raw(bench, &mut weights)?
        }
        _ => {
            let bound = bench.cx.loaded.bind_direct(case.request(), &views);
            bound.map_err(|e| e.to_string())?
        }
    };
    drop(weights);
    let from: Vec<TensorView> = inputs
        .iter_mut()
        .map(|room| room.as_mut().map_or(TensorView::ABSENT, Room::raw))
        .collect();
    let to: Vec<TensorView> = outputs.iter_mut().map(Room::raw).collect();
    let done = bound.call_raw(bench.cx.throwaway, &from, &to, &[]);
    done.map_err(|e| e.to_string())?;
    Ok(outputs)
}

fn bind_raw(bench: &Bench<'_>, weights: &mut [(String, Room)]) -> Result<BoundForm, String> {
    // What the views of statistics point into is there until the bind is over.
    let (mut raw, _kept) = raw_of(bench);
    raw.weights = weights
        .iter_mut()
        .map(|(name, room)| (name.clone().into_bytes(), room.raw()))
        .collect();
    let bound = bench.cx.loaded.plugin().bind_raw(bench.cx.throwaway, &raw);
    bound.map_err(|e| e.to_string())
}

/// The usual case as raw arguments, and the rooms that its views point into.
pub(super) fn raw_of(bench: &Bench<'_>) -> (RawBind, Vec<Room>) {
    let request = bench.case.request();
    let mut kept = Vec::new();
    let mut views = |list: Vec<(&String, Room)>| -> Vec<(Vec<u8>, TensorView)> {
        let each = list.into_iter().map(|(name, mut room)| {
            // The bytes of a room do not move with it.
            let view = room.raw();
            kept.push(room);
            (name.clone().into_bytes(), view)
        });
        each.collect()
    };
    let weights = request.weights.iter();
    let weights = views(weights.map(|(n, w)| (n, Room::of(w, PLAIN))).collect());
    let statistics = request.statistics.iter().map(|(name, values)| {
        let dims: &[usize] = match values.len() {
            1 => &[],
            _ => &[values.len()],
        };
        let operand = structures_suite::operand::Operand::new(
            values,
            dims,
            structures_plugin_api::DType::F32,
        );
        (name, Room::of(&operand, PLAIN))
    });
    let statistics = views(statistics.collect());
    let raw = RawBind {
        form: request.form.clone().into_bytes(),
        span: request.span.clone().into_bytes(),
        device: bench.device(),
        weights,
        statistics,
        params: serde_json::to_vec(&request.params).unwrap_or_default(),
        contract: Some(Contract::capacity(request.dtype, request.capacity)),
        struct_size: RawBind::SIZE,
        null_arrays: false,
    };
    (raw, kept)
}
