use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::*;
use crate::crew::{tests::Scoped, Alone};
use crate::graph::{Dim, GraphBuilder, StateRegion};
use crate::ops::{AttrValue, OpKind};
use crate::session::tests::{decoder, inputs, random, Random};
use crate::session::{Install, SpanRunner};

const ROOM: usize = 24;
const SERVED: Frozen = Frozen::Served { allocates: false };

fn session() -> Session {
    Session::new(decoder(), &Random).unwrap()
}

/// A state of `n` tokens with room for [`ROOM`].
fn prefilled(s: &Session, n: i64) -> State {
    let mut state = s.new_state(1, ROOM);
    state.reserve().unwrap();
    s.run(&s.host_plan(), &inputs(0, n), &mut state, None)
        .unwrap();
    state
}

fn capture(
    s: &Session,
    plan: &Plan,
    state: &State,
    windows: &[Declared],
) -> Result<StaticPlan, GraphError> {
    let inputs = inputs(state.len() as i64, 1);
    s.capture(
        plan,
        &Capture {
            inputs: &inputs,
            state,
            windows,
            greedy: None,
            last_row: None,
        },
    )
}

fn flat(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1::<f32>().unwrap()
}

fn close(a: &Tensor, b: &Tensor) {
    assert_eq!(a.dims(), b.dims());
    for (a, b) in flat(a).iter().zip(flat(b)) {
        assert!((a - b).abs() < 1e-5, "{a} is not {b}");
    }
}

fn caches(state: &State) -> Vec<Vec<f32>> {
    (0..2).map(|i| flat(state.whole(i).unwrap())).collect()
}

/// Replays the step of the token at the state's end.
fn replayed(plan: &mut StaticPlan, state: &mut State) -> Tensor {
    let [ids, positions] = inputs(state.len() as i64, 1);
    plan.write("ids", &ids).unwrap();
    plan.write("positions", &positions).unwrap();
    plan.replay(state, &Alone).unwrap();
    plan.read("y").unwrap()
}

#[test]
fn both_forms_go_on_from_one_state_and_agree() {
    let s = session();
    let host = s.host_plan();
    let mut eager = prefilled(&s, 5);
    let mut state = eager.clone_deep().unwrap();
    let mut step = capture(&s, &host, &state, &[]).unwrap();
    assert!(
        step.manifest().allocating.is_empty(),
        "{:?}",
        step.manifest()
    );
    for i in 0..8 {
        let want = s
            .run(&host, &inputs(eager.len() as i64, 1), &mut eager, None)
            .unwrap();
        // Every third one is run eagerly on the state the replays left.
        let got = match i % 3 {
            2 => s
                .run(&host, &inputs(state.len() as i64, 1), &mut state, None)
                .unwrap()[0]
                .clone(),
            _ => replayed(&mut step, &mut state),
        };
        close(&got, &want[0]);
        assert_eq!(state.len(), eager.len());
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let s = session();
    let mut state = prefilled(&s, 5);
    let mut step = capture(&s, &s.host_plan(), &state, &[]).unwrap();
    let mark = step.mark(&state);
    step.replay(&mut state, &Alone).unwrap();
    let one = flat(&step.read("y").unwrap());
    step.restore(&mut state, mark).unwrap();
    step.replay(&mut state, &Scoped).unwrap();
    assert_eq!(one, flat(&step.read("y").unwrap()));
}

#[test]
fn a_full_window_is_refused_and_nothing_moves() {
    let s = session();
    let mut state = prefilled(&s, ROOM as i64 - 1);
    let mut step = capture(&s, &s.host_plan(), &state, &[]).unwrap();
    step.replay(&mut state, &Alone).unwrap();
    let before = caches(&state);
    let full = step.replay(&mut state, &Alone).unwrap_err();
    assert!(
        full.to_string().contains("at most 24, found 24 held"),
        "{full}"
    );
    assert_eq!((state.len(), caches(&state)), (ROOM, before));
    let mut other = s.new_state(1, ROOM);
    let bare = step.replay(&mut other, &Alone).unwrap_err();
    assert!(
        bare.to_string().contains("state of a captured step"),
        "{bare}"
    );
}

#[test]
fn b_235_warming_up_leaves_no_trace() {
    let s = session();
    let mut state = prefilled(&s, 6);
    let untouched = caches(&state);
    let mut step = capture(&s, &s.host_plan(), &state, &[]).unwrap();
    step.warm_up(&mut state, &Alone, 3).unwrap();
    assert_eq!((state.len(), caches(&state)), (6, untouched));
    let first = flat(&replayed(&mut step, &mut state));
    let mut fresh = prefilled(&s, 6);
    let mut cold = capture(&s, &s.host_plan(), &fresh, &[]).unwrap();
    assert_eq!(first, flat(&replayed(&mut cold, &mut fresh)));
}

/// Adds one to its input, or fails, or declines what it settled.
struct Runner {
    frozen: Frozen,
    fail_at: u64,
    calls: AtomicU64,
    counted: AtomicU64,
}

impl Runner {
    fn new(frozen: Frozen) -> Arc<Self> {
        Arc::new(Runner {
            frozen,
            fail_at: u64::MAX,
            calls: AtomicU64::new(0),
            counted: AtomicU64::new(0),
        })
    }
}

impl SpanRunner for Runner {
    fn run(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
        match self.calls.fetch_add(1, Ordering::Relaxed) {
            n if n >= self.fail_at => Ok(SpanOutcome::Host),
            _ => {
                let x = inputs[0].as_ref().unwrap();
                Ok(SpanOutcome::Done(vec![(x + 1.0).unwrap()]))
            }
        }
    }

    fn freeze(&self, inputs: &[Option<&[usize]>]) -> Result<Frozen, GraphError> {
        assert_eq!(inputs[0], Some(&[1, 1, 8][..]));
        Ok(self.frozen)
    }

    fn replay(
        &self,
        inputs: &[Option<View<'_>>],
        outputs: &mut [ViewMut<'_>],
    ) -> Result<(), GraphError> {
        let (x, dims) = inputs[0].unwrap();
        let (y, out) = &mut outputs[0];
        assert_eq!((dims, *out), (&[1, 1, 8][..], &[1, 1, 8][..]));
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x + 1.0);
        match self.calls.fetch_add(1, Ordering::Relaxed) {
            n if n >= self.fail_at => Err(GraphError::Guard {
                name: "o".into(),
                reason: "planted".into(),
            }),
            _ => Ok(()),
        }
    }

    fn replayed(&self, planned: Frozen) {
        assert_eq!(planned, self.frozen);
        self.counted.fetch_add(1, Ordering::Relaxed);
    }
}

/// The last projection by a runner.
fn installed(s: &Session, runner: Arc<Runner>) -> Plan {
    let g = s.graph();
    let v = |name: &str| g.value_named(name).unwrap();
    let (op, _) = g.producer(v("o.o")).unwrap();
    let install = Install {
        name: "o".into(),
        ops: vec![op],
        inputs: vec![g.op(op).inputs[0]],
        outputs: vec![v("o.o")],
        runner,
    };
    s.plan(vec![install]).unwrap()
}

#[test]
fn a_span_is_served_left_to_the_host_or_asked_and_counted_once_a_replay() {
    let s = session();
    for frozen in [SERVED, Frozen::Tensors, Frozen::Host] {
        let runner = Runner::new(frozen);
        let plan = installed(&s, runner.clone());
        let mut state = prefilled(&s, 4);
        let mut eager = state.clone_deep().unwrap();
        let mut step = capture(&s, &plan, &state, &[]).unwrap();
        let want = match frozen {
            Frozen::Host => s.host_plan(),
            _ => installed(&s, Runner::new(frozen)),
        };
        step.warm_up(&mut state, &Alone, 2).unwrap();
        assert_eq!(runner.counted.load(Ordering::Relaxed), 0);
        for n in 1..4 {
            let want = s
                .run(&want, &inputs(eager.len() as i64, 1), &mut eager, None)
                .unwrap();
            close(&replayed(&mut step, &mut state), &want[0]);
            assert_eq!(runner.counted.load(Ordering::Relaxed), n);
        }
        let left: Vec<&str> = step.left_to_host().collect();
        assert_eq!(left.len(), usize::from(frozen == Frozen::Host));
        let allocating = step.manifest().allocating;
        assert_eq!(
            allocating.len(),
            usize::from(frozen == Frozen::Tensors),
            "{allocating:?}"
        );
    }
}

#[test]
fn a_guard_that_fires_ends_the_step_by_name_and_moves_nothing() {
    let s = session();
    for frozen in [SERVED, Frozen::Tensors] {
        let runner = Arc::new(Runner {
            fail_at: 1,
            ..Arc::into_inner(Runner::new(frozen)).unwrap()
        });
        let mut state = prefilled(&s, 4);
        let mut step = capture(&s, &installed(&s, runner.clone()), &state, &[]).unwrap();
        step.replay(&mut state, &Alone).unwrap();
        let fired = step.replay(&mut state, &Alone).unwrap_err();
        assert!(
            matches!(&fired, GraphError::Guard { name, .. } if name == "o"),
            "{fired}"
        );
        assert_eq!(state.len(), 5);
        assert_eq!(
            runner.counted.load(Ordering::Relaxed),
            1,
            "an unmade step counts nothing"
        );
        // The host makes the step on the very state.
        let mut want = prefilled(&s, 4);
        let plan = installed(&s, Runner::new(frozen));
        s.run(&plan, &inputs(4, 1), &mut want, None).unwrap();
        let (mut a, mut b) = (state.clone_deep().unwrap(), want);
        let host = s.host_plan();
        let x = s.run(&host, &inputs(5, 1), &mut a, None).unwrap();
        let y = s.run(&host, &inputs(5, 1), &mut b, None).unwrap();
        close(&x[0], &y[0]);
    }
}

#[test]
fn b_206_a_window_takes_its_own_form_only() {
    let s = session();
    let mut state = prefilled(&s, 4);
    let mut step = capture(&s, &s.host_plan(), &state, &[]).unwrap();
    let before = step.read("ids").unwrap();
    let long = Tensor::new(&[[1i64, 2]], &Device::Cpu).unwrap();
    let typed = Tensor::new(&[[1u32]], &Device::Cpu).unwrap();
    for wrong in [long, typed] {
        let e = step.write("ids", &wrong).unwrap_err().to_string();
        assert!(e.contains("expected i64 [1, 1] on cpu, given"), "{e}");
    }
    let e = step.write("idz", &before).unwrap_err();
    assert!(
        matches!(&e, GraphError::NoWindow { known, .. } if known.contains("ids")),
        "{e}"
    );
    let e = step
        .write("y", &random(&[1, 1, 8], 3))
        .unwrap_err()
        .to_string();
    assert!(e.contains("only read"), "{e}");
    assert!(step.read("idz").is_err());
    step.replay(&mut state, &Alone).unwrap();
    assert_eq!(step.read("y").unwrap().dims(), [1, 1, 8]);
}

#[test]
fn b_207_a_window_of_another_tensor_is_a_conflict() {
    let s = session();
    let state = prefilled(&s, 4);
    let ids = s.graph().value_named("ids").unwrap();
    let declare = |name: &str, value, kind| {
        let d = Declared {
            name: name.into(),
            value,
            kind,
        };
        capture(&s, &s.host_plan(), &state, &[d]).err()
    };
    assert!(declare("ids", ids, WindowKind::Staged).is_none());
    let code = |e: Option<GraphError>| match e {
        Some(GraphError::Capture { code, .. }) => code,
        other => panic!("{other:?}"),
    };
    let other = s.graph().value_named("positions").unwrap();
    assert_eq!(
        code(declare("ids", other, WindowKind::Swap)),
        "window_conflict"
    );
    assert_eq!(
        code(declare("ids", ids, WindowKind::Readback)),
        "window_form"
    );
    let none = declare("nothing", ids, WindowKind::Swap).unwrap();
    assert!(matches!(none, GraphError::NoWindow { .. }), "{none}");
}

#[test]
fn b_206_a_staged_window_takes_effect_at_the_next_replay() {
    let s = session();
    let mut state = prefilled(&s, 4);
    let staged = Declared {
        name: "ids".into(),
        value: s.graph().value_named("ids").unwrap(),
        kind: WindowKind::Staged,
    };
    let mut step = capture(&s, &s.host_plan(), &state, &[staged]).unwrap();
    let number = |t: Tensor| t.flatten_all().unwrap().to_vec1::<i64>().unwrap()[0];
    let now = number(step.read("ids").unwrap());
    let next = Tensor::new(&[[now - 1]], &Device::Cpu).unwrap();
    step.write("ids", &next).unwrap();
    assert_eq!(number(step.read("ids").unwrap()), now);
    step.replay(&mut state, &Alone).unwrap();
    assert_eq!(number(step.read("ids").unwrap()), now - 1);
}

/// x of 6 -> what has no code in the arena, a recurrent state and views that lie apart.
fn mixed() -> Arc<Graph> {
    let mut b = GraphBuilder::new("mixed");
    let bt = |n: &[usize]| {
        let symbols = ["B", "T"].map(|s| Dim::Symbol(s.into())).into_iter();
        symbols
            .chain(n.iter().map(|n| Dim::Size(*n)))
            .collect::<Vec<_>>()
    };
    let x = b.input("x", bt(&[6]));
    let exact = [("kind", AttrValue::Word("gelu_exact".into()))];
    let g = b.op(OpKind::Act, "", "g", &[Some(x)], &exact, bt(&[6]));
    let parts = b.ops(
        OpKind::Chunk,
        "",
        &[Some(g)],
        &[("n", AttrValue::Int(2))],
        vec![("lo", bt(&[3])), ("hi", bt(&[3]))],
    );
    let region = b.state(StateRegion::fixed("s", &[1, 3]));
    let sum = b.op(
        OpKind::Add,
        "",
        "sum",
        &[Some(parts[1]), Some(region)],
        &[],
        bt(&[3]),
    );
    b.op(
        OpKind::StateWrite,
        "",
        "kept",
        &[Some(sum), Some(region)],
        &[],
        bt(&[3]),
    );
    let joined = [Some(parts[0]), Some(sum)];
    let y = b.op(OpKind::Concat, "", "y", &joined, &[], bt(&[6]));
    let l2 = [("eps", AttrValue::Float(1e-6))];
    let y = b.op(OpKind::L2Norm, "", "n", &[Some(y)], &l2, bt(&[6]));
    b.output("y", y);
    Arc::new(b.finish())
}

#[test]
fn what_has_no_code_here_goes_through_candle_and_is_listed() {
    let s = Session::new(mixed(), &Random).unwrap();
    let mut eager = s.new_state(2, 8);
    let mut state = s.new_state(2, 8);
    let input = |i: u32| random(&[2, 1, 6], i);
    let first = [input(1)];
    let capture = Capture {
        inputs: &first,
        state: &state,
        windows: &[],
        greedy: None,
        last_row: None,
    };
    let mut step = s.capture(&s.host_plan(), &capture).unwrap();
    let manifest = step.manifest();
    let want = [
        "load at s",
        "act at g",
        "state_write at kept",
        "concat at y",
    ];
    assert_eq!(manifest.allocating, want);
    assert!(manifest
        .stages
        .iter()
        .any(|s| s.kind == "l2_norm" && s.in_place));
    step.warm_up(&mut state, &Alone, 2).unwrap();
    for i in 1..5 {
        let want = s
            .run(&s.host_plan(), &[input(i)], &mut eager, None)
            .unwrap();
        step.write("x", &input(i)).unwrap();
        step.replay(&mut state, &Alone).unwrap();
        assert_eq!(
            flat(&step.read("y").unwrap()),
            flat(&want[0]),
            "candle's own bits"
        );
    }
}

#[test]
fn a_value_that_grows_with_the_state_is_refused() {
    let mut b = GraphBuilder::new("grows");
    let dims = |t: &str| {
        vec![
            Dim::Symbol("B".into()),
            Dim::Size(1),
            Dim::Symbol(t.into()),
            Dim::Size(4),
        ]
    };
    let x = b.input("x", dims("T"));
    let region = b.state(StateRegion::growing("r", 1, 4));
    let all = b.op(
        OpKind::KvAppend,
        "",
        "all",
        &[Some(x), Some(region)],
        &[],
        dims("S"),
    );
    let by = [("by", AttrValue::Int(2))];
    let y = b.op(OpKind::Scale, "", "y", &[Some(all)], &by, dims("S"));
    b.output("y", y);
    let s = Session::new(Arc::new(b.finish()), &Random).unwrap();
    let mut state = s.new_state(1, 8);
    state.reserve().unwrap();
    let inputs = [random(&[1, 1, 1, 4], 1)];
    let capture = Capture {
        inputs: &inputs,
        state: &state,
        windows: &[],
        greedy: None,
        last_row: None,
    };
    match s.capture(&s.host_plan(), &capture).unwrap_err() {
        GraphError::Capture { at, code, .. } => {
            assert_eq!((at.as_str(), code), ("y", "capture_shape_moved"));
        }
        e => panic!("{e}"),
    }
}

#[test]
fn b_234_the_next_token_and_its_position_are_chosen_inside() {
    let s = session();
    let mut state = prefilled(&s, 4);
    let mut eager = state.clone_deep().unwrap();
    let [ids, positions] = inputs(4, 1);
    let inputs = [ids.clone(), positions];
    let capture = Capture {
        inputs: &inputs,
        state: &state,
        windows: &[],
        greedy: Some(Greedy {
            scores: 0,
            token: 0,
            position: 1,
        }),
        last_row: None,
    };
    let mut step = s.capture(&s.host_plan(), &capture).unwrap();
    let first = ids.flatten_all().unwrap().to_vec1::<i64>().unwrap()[0];
    let mut token = first;
    let mut want = Vec::new();
    for at in 4..12i64 {
        let x = Tensor::new(&[[token]], &Device::Cpu).unwrap();
        let p = Tensor::new(&[at], &Device::Cpu).unwrap();
        let y = s.run(&s.host_plan(), &[x, p], &mut eager, None).unwrap();
        token = row::argmax(&flat(&y[0])).unwrap() as i64;
        want.push(token as u32);
    }
    step.begin_with(first as u32, 4);
    step.warm_up(&mut state, &Alone, 2).unwrap();
    let got: Vec<u32> = (4..12)
        .map(|_| {
            step.replay(&mut state, &Alone).unwrap();
            step.choice().unwrap()
        })
        .collect();
    assert_eq!(got, want);
    assert_eq!(step.scores().unwrap().len(), 8);
    assert_eq!(step.read("positions").unwrap().dtype(), DType::I64);
}

#[test]
fn b_212_the_manifest_names_windows_regions_and_stages() {
    let s = session();
    let state = prefilled(&s, 4);
    let step = capture(&s, &s.host_plan(), &state, &[]).unwrap();
    let m = step.manifest();
    let names: Vec<&str> = m.windows.iter().map(|w| w.name.as_str()).collect();
    assert_eq!(names, ["ids", "positions", "y"]);
    assert_eq!(m.windows[2].bytes, 32);
    assert!(m.windows[2]
        .address
        .is_some_and(|a| a + 32 <= m.arena_bytes));
    assert_eq!(m.regions[0].dims, [1, 1, ROOM, 4]);
    assert!(
        m.arena_bytes < m.planned_bytes,
        "{} {}",
        m.arena_bytes,
        m.planned_bytes
    );
    assert!(m.stages.iter().all(|s| s.in_place));
    assert_eq!((m.batch, m.tokens, m.capacity), (1, 1, ROOM));
}

/// Keeps the keys it was given, position by position, and answers zeros.
struct Keys {
    as_they_lie: bool,
    seen: std::sync::Mutex<Vec<Vec<f32>>>,
}

impl SpanRunner for Keys {
    fn run(&self, _: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
        Ok(SpanOutcome::Host)
    }

    fn freeze(&self, _: &[Option<&[usize]>]) -> Result<Frozen, GraphError> {
        Ok(SERVED)
    }

    fn reads_regions(&self) -> bool {
        self.as_they_lie
    }

    fn replay(
        &self,
        inputs: &[Option<View<'_>>],
        outputs: &mut [ViewMut<'_>],
    ) -> Result<(), GraphError> {
        let (keys, dims) = inputs[1].unwrap();
        let [batch, heads, len, d] = *dims else {
            panic!("{dims:?}")
        };
        let dense = batch * heads * len * d;
        assert_eq!(keys.len() > dense, self.as_they_lie, "room for {ROOM}");
        let head = keys.len() / (batch * heads);
        let valid = keys.chunks(head).flat_map(|head| &head[..len * d]);
        self.seen.lock().unwrap().push(valid.copied().collect());
        outputs[0].0.fill(0.0);
        Ok(())
    }
}

#[test]
fn a_region_comes_dense_or_as_it_lies_and_is_the_same_either_way() {
    let s = session();
    let seen = [false, true].map(|as_they_lie| {
        let runner = Arc::new(Keys {
            as_they_lie,
            seen: Default::default(),
        });
        let g = s.graph();
        let out = g.value_named("attn.a").unwrap();
        let (op, _) = g.producer(out).unwrap();
        let install = Install {
            name: "attn".into(),
            ops: vec![op],
            inputs: g.op(op).inputs[..3].to_vec(),
            outputs: vec![out],
            runner: runner.clone(),
        };
        let plan = s.plan(vec![install]).unwrap();
        let mut state = prefilled(&s, 4);
        let mut step = capture(&s, &plan, &state, &[]).unwrap();
        for _ in 0..3 {
            step.replay(&mut state, &Alone).unwrap();
        }
        let seen = runner.seen.lock().unwrap().clone();
        seen
    });
    let lens: Vec<usize> = seen[0].iter().map(Vec::len).collect();
    assert_eq!(lens, [5, 6, 7].map(|n| n * 4));
    assert_eq!(seen[0], seen[1]);
}
