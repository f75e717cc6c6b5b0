//! The parameters of a session: in memory, not read yet, or let go.
//!
//! A parameter that no host operation is planned to read may be released, so that its memory is free for something else.
//! Whoever reads it all the same gets it again from where it came from, counted; where it was let go for good there is an
//! error that names it. Row ranges of one parameter share its memory, so a parameter goes and comes back whole.
//!
//! Owns what is held and what is gone. Does not own where originals come from, nor who may let go of what.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use candle_core::{DType, Tensor};

use crate::graph::{Dim, Graph, Origin, ParamRef, ValueId};
use crate::session::{listed, ParamSource, Rows};
use crate::GraphError;

/// Gives released parameters back.
pub trait Originals: Send + Sync {
    /// The parameter whole, exactly as it was when it was released, or why not.
    fn restore(&self, param: &ParamRef) -> Result<Tensor, GraphError>;
}

/// A parameter and the values of the graph that are all of it or rows of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// All its rows.
    pub param: ParamRef,
    /// Its values.
    pub values: Vec<ValueId>,
}

pub(crate) struct Params {
    graph: Arc<Graph>,
    by_ref: HashMap<ParamRef, ValueId>,
    /// Where those come from that are not read yet.
    source: Option<Arc<dyn ParamSource + Send + Sync>>,
    cells: RwLock<Cells>,
}

struct Cells {
    /// By value.
    values: Vec<Cell>,
    /// How often each parameter came back.
    restored: BTreeMap<String, u64>,
    /// Those that are looked up without being read as tensors; `None` where the source has no such form.
    tables: HashMap<ValueId, Option<Arc<dyn Rows>>>,
}

#[derive(Clone)]
enum Cell {
    /// The value is no parameter.
    Other,
    Held(Tensor),
    /// Not read yet.
    Unread,
    /// Released; without a source for good.
    Gone(Option<Arc<dyn Originals>>),
}

impl Params {
    /// Every parameter of the graph.
    pub(crate) fn load(
        graph: Arc<Graph>,
        mut load: impl FnMut(&ParamRef) -> Result<Tensor, GraphError>,
    ) -> Result<Self, GraphError> {
        let params = Self::nothing_read(graph, None);
        let mut cells = params.write();
        for stored in stored(&params.graph) {
            let whole = load(&stored.param)?;
            params.hold(&mut cells, &stored, &whole)?;
        }
        drop(cells);
        Ok(params)
    }

    /// Every parameter of the graph, read when it is first asked for.
    pub(crate) fn later(graph: Arc<Graph>, source: Arc<dyn ParamSource + Send + Sync>) -> Self {
        Self::nothing_read(graph, Some(source))
    }

    fn nothing_read(graph: Arc<Graph>, source: Option<Arc<dyn ParamSource + Send + Sync>>) -> Self {
        let mut values = vec![Cell::Other; graph.values.len()];
        let mut by_ref = HashMap::new();
        for v in stored(&graph).flat_map(|s| s.values) {
            if let Some((param, _)) = graph.param(v) {
                values[v.0] = Cell::Unread;
                by_ref.insert(param.clone(), v);
            }
        }
        Params {
            graph,
            by_ref,
            source,
            cells: RwLock::new(Cells {
                values,
                restored: BTreeMap::new(),
                tables: HashMap::new(),
            }),
        }
    }

    /// Puts every value of a parameter in memory.
    fn hold(&self, cells: &mut Cells, stored: &Stored, whole: &Tensor) -> Result<(), GraphError> {
        let whole = whole
            .to_dtype(DType::F32)
            .map_err(|e| at_param(&stored.param, e))?;
        for v in &stored.values {
            if let Some((_, tensor)) = part(&self.graph, *v, &whole)? {
                cells.values[v.0] = Cell::Held(tensor);
                cells.tables.remove(v);
            }
        }
        Ok(())
    }

    fn read(&self) -> RwLockReadGuard<'_, Cells> {
        self.cells.read().unwrap_or_else(|e| e.into_inner())
    }

    fn write(&self) -> RwLockWriteGuard<'_, Cells> {
        self.cells.write().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn value_of(&self, param: &ParamRef) -> Option<ValueId> {
        self.by_ref.get(param).copied()
    }

    /// The tensor of a value, `None` where it is no parameter. What was released comes back here, and stays.
    pub(crate) fn get(&self, value: ValueId) -> Result<Option<Tensor>, GraphError> {
        match self.read().values.get(value.0) {
            Some(Cell::Held(t)) => return Ok(Some(t.clone())),
            Some(Cell::Unread | Cell::Gone(_)) => {}
            Some(Cell::Other) | None => return Ok(None),
        }
        self.bring_back(value)
    }

    /// The tensor of a value that is in memory now.
    pub(crate) fn held(&self, value: ValueId) -> Option<Tensor> {
        match self.read().values.get(value.0) {
            Some(Cell::Held(t)) => Some(t.clone()),
            _ => None,
        }
    }

    /// Whether a value is a parameter that nobody has read yet.
    pub(crate) fn unread(&self, value: ValueId) -> bool {
        matches!(self.read().values.get(value.0), Some(Cell::Unread))
    }

    /// The rows of a value that nobody has read as a tensor, where its source keeps them in a smaller form. They stay
    /// until somebody needs the tensor.
    pub(crate) fn table(&self, value: ValueId) -> Result<Option<Arc<dyn Rows>>, GraphError> {
        let param = match (self.unread(value), self.graph.param(value)) {
            (true, Some((param, _))) if param.rows.is_none() => param,
            _ => return Ok(None),
        };
        if let Some(known) = self.read().tables.get(&value) {
            return Ok(known.clone());
        }
        let Some(source) = &self.source else {
            return Ok(None);
        };
        let declared = &self.graph.value(value).dims;
        // A table of another shape is for whoever reads the tensor to refuse.
        let fits = |rows: &Arc<dyn Rows>| {
            let (count, width) = rows.dims();
            declared[..] == [Dim::Size(count), Dim::Size(width)]
        };
        let table = source.rows(param)?.filter(fits);
        let mut cells = self.write();
        if !matches!(cells.values[value.0], Cell::Unread) {
            return Ok(None);
        }
        Ok(cells.tables.entry(value).or_insert(table).clone())
    }

    /// Nobody waits while it is read; of two who read the same, the first is kept.
    fn bring_back(&self, value: ValueId) -> Result<Option<Tensor>, GraphError> {
        let Some((param, _)) = self.graph.param(value) else {
            return Ok(None);
        };
        let whole = all_rows(param);
        let gone = || GraphError::Released {
            param: whole.to_string(),
        };
        let cell = self.read().values[value.0].clone();
        let tensor = match &cell {
            Cell::Held(t) => return Ok(Some(t.clone())),
            Cell::Other => return Ok(None),
            Cell::Unread => self.source.as_ref().ok_or_else(gone)?.tensor(&whole)?,
            Cell::Gone(from) => from.as_ref().ok_or_else(gone)?.restore(&whole)?,
        };
        let mut cells = self.write();
        match &cells.values[value.0] {
            Cell::Unread => {}
            Cell::Gone(_) => *cells.restored.entry(whole.to_string()).or_default() += 1,
            Cell::Held(t) => return Ok(Some(t.clone())),
            Cell::Other => return Ok(None),
        }
        for stored in stored(&self.graph).filter(|s| s.param == whole) {
            self.hold(&mut cells, &stored, &tensor)?;
        }
        match &cells.values[value.0] {
            Cell::Held(t) => Ok(Some(t.clone())),
            _ => Ok(None),
        }
    }

    /// Lets go of a parameter; without a source for good, also of one that was let go with one before.
    pub(crate) fn release(&self, param: &ParamRef, from: Option<&Arc<dyn Originals>>) {
        let mut cells = self.write();
        for stored in stored(&self.graph).filter(|s| s.param == *param) {
            for v in stored.values {
                cells.values[v.0] = Cell::Gone(from.cloned());
                cells.tables.remove(&v);
            }
        }
    }

    /// Whether a tensor is, bit for bit, what the values of a parameter hold.
    pub(crate) fn is(&self, stored: &Stored, whole: &Tensor) -> Result<bool, GraphError> {
        for v in &stored.values {
            let (Some(held), Some((_, other))) = (self.held(*v), part(&self.graph, *v, whole)?)
            else {
                return Ok(false);
            };
            let same = same_bits(&held, &other).map_err(|e| at_param(&stored.param, e))?;
            if !same {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// How often each parameter came back after it was released.
    pub(crate) fn restored(&self) -> BTreeMap<String, u64> {
        self.read().restored.clone()
    }
}

fn all_rows(param: &ParamRef) -> ParamRef {
    ParamRef {
        rows: None,
        ..param.clone()
    }
}

/// The parameters of a graph in its order.
pub(crate) fn stored(graph: &Graph) -> impl Iterator<Item = Stored> {
    let mut found: Vec<Stored> = Vec::new();
    let mut index: HashMap<ParamRef, usize> = HashMap::new();
    for (i, value) in graph.values.iter().enumerate() {
        let Origin::Param { param, .. } = &value.origin else {
            continue;
        };
        let param = all_rows(param);
        let at = *index.entry(param.clone()).or_insert_with(|| {
            found.push(Stored {
                param,
                values: Vec::new(),
            });
            found.len() - 1
        });
        found[at].values.push(ValueId(i));
    }
    found.into_iter()
}

fn same_bits(a: &Tensor, b: &Tensor) -> candle_core::Result<bool> {
    if a.dims() != b.dims() || b.dtype() != DType::F32 {
        return Ok(false);
    }
    let bits = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
    let (a, b) = (bits(a)?, bits(b)?);
    Ok(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()))
}

/// A value of the whole parameter, with the dims the graph declares.
fn part<'g>(
    graph: &'g Graph,
    value: ValueId,
    whole: &Tensor,
) -> Result<Option<(&'g ParamRef, Tensor)>, GraphError> {
    let Some((param, _)) = graph.param(value) else {
        return Ok(None);
    };
    let tensor = cut(param, &graph.value(value).dims, whole.clone())?;
    Ok(Some((param, tensor)))
}

fn at_param(param: &ParamRef, e: candle_core::Error) -> GraphError {
    GraphError::Kernel {
        op: "parameter".into(),
        at: param.to_string(),
        source: Box::new(e),
    }
}

/// The rows the reference names, with the dims the graph declares.
fn cut(param: &ParamRef, dims: &[Dim], stored: Tensor) -> Result<Tensor, GraphError> {
    let mismatch = |found: String| GraphError::Mismatch {
        what: format!("parameter `{param}`"),
        expected: format!("[{}]", listed(dims)),
        found,
    };
    let t = match param.rows {
        // A kernel of a convolution over patches, read as the matrix it is.
        None if stored.rank() > 2 && dims.len() == 2 && dims[0] == Dim::Size(stored.dims()[0]) => {
            stored.flatten_from(1).map_err(|e| at_param(param, e))?
        }
        None => stored,
        Some((from, to)) => {
            let rows = stored.dims().first().copied().unwrap_or(0);
            if from >= to || to > rows {
                let found = format!("rows {from}..{to} of a stored tensor {:?}", stored.dims());
                return Err(mismatch(found));
            }
            stored
                .narrow(0, from, to - from)
                .map_err(|e| at_param(param, e))?
        }
    };
    let fits =
        t.rank() == dims.len() && dims.iter().zip(t.dims()).all(|(d, n)| *d == Dim::Size(*n));
    if fits {
        Ok(t)
    } else {
        Err(mismatch(format!("{:?}", t.dims())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::captured::{Capture, Greedy};
    use crate::session::tests::{decoder, Random};
    use crate::{ParamSource, Session};
    use candle_core::Device;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// What a session was loaded from, and how often it was asked.
    #[derive(Default)]
    struct File(AtomicUsize);

    impl Originals for File {
        fn restore(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Random.tensor(param)
        }
    }

    fn inputs(from: u32, n: u32) -> [Tensor; 2] {
        let ids: Vec<u32> = (0..n).map(|i| (from + i) % 11).collect();
        let at: Vec<u32> = (from..from + n).collect();
        [
            Tensor::from_vec(ids, (1, n as usize), &Device::Cpu).unwrap(),
            Tensor::from_vec(at, n as usize, &Device::Cpu).unwrap(),
        ]
    }

    fn run(s: &Session) -> Result<Vec<u32>, GraphError> {
        let out = s.run(&s.host_plan(), &inputs(0, 3), &mut s.new_state(1, 0), None)?;
        let out = out[0].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        Ok(out.into_iter().map(f32::to_bits).collect())
    }

    #[test]
    fn a_released_parameter_comes_back_whole_once_it_is_read() {
        let s = Session::new(decoder(), &Random).unwrap();
        let want = run(&s).unwrap();
        let file = Arc::new(File::default());
        let from: Arc<dyn Originals> = file.clone();
        let stored = s.stored();
        let qkv = stored.iter().find(|p| p.param.path == "qkv").unwrap();
        assert_eq!(qkv.values.len(), 3, "three ranges of its rows");
        for round in 1..=2 {
            s.release(&qkv.param, Some(&from));
            assert!(!s.holds(qkv) && stored.iter().filter(|p| !s.holds(p)).count() == 1);
            assert_eq!(run(&s).unwrap(), want);
            assert!(s.holds(qkv));
            assert_eq!(
                file.0.load(Ordering::Relaxed),
                round,
                "asked once for all ranges"
            );
            assert_eq!(s.restored()[&qkv.param.to_string()], round as u64);
        }
        assert!(s
            .holds_this(qkv, &Random.tensor(&qkv.param).unwrap())
            .unwrap());
        let other = Random
            .tensor(&qkv.param)
            .unwrap()
            .affine(1.0, 1e-6)
            .unwrap();
        assert!(!s.holds_this(qkv, &other).unwrap());
    }

    #[test]
    fn what_was_let_go_for_good_is_an_error_that_names_it() {
        let s = Session::new(decoder(), &Random).unwrap();
        let stored = s.stored();
        let o = stored.iter().find(|p| p.param.path == "o").unwrap();
        s.release(&o.param, None);
        match run(&s).unwrap_err() {
            GraphError::Released { param } => assert_eq!(param, o.param.to_string()),
            e => panic!("{e}"),
        }
        assert!(s.param(&o.param).is_err() && s.restored().is_empty());
    }

    /// What keeps its matrices as tables: which were read as tensors.
    #[derive(Default)]
    struct Tables {
        odd: bool,
        read: std::sync::Mutex<Vec<String>>,
    }

    struct Table(Vec<Vec<f32>>);

    impl Rows for Table {
        fn dims(&self) -> (usize, usize) {
            (self.0.len(), self.0[0].len())
        }

        fn row(&self, at: usize, out: &mut [f32]) -> Result<(), GraphError> {
            out.copy_from_slice(&self.0[at]);
            Ok(())
        }
    }

    impl ParamSource for Tables {
        fn tensor(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
            self.read.lock().unwrap().push(param.path.clone());
            Random.tensor(param)
        }

        fn rows(&self, param: &ParamRef) -> Result<Option<Arc<dyn Rows>>, GraphError> {
            let mut rows = Random.tensor(param)?.to_vec2::<f32>().unwrap();
            rows.truncate(rows.len() - usize::from(self.odd));
            Ok(Some(Arc::new(Table(rows))))
        }
    }

    fn embed_reads(source: &Tables) -> usize {
        let read = source.read.lock().unwrap();
        read.iter().filter(|p| *p == "embed").count()
    }

    #[test]
    fn rows_are_looked_up_without_the_tensor_to_the_same_bits() {
        let want = run(&Session::new(decoder(), &Random).unwrap()).unwrap();
        let source = Arc::new(Tables::default());
        let s = Session::reading_later(decoder(), source.clone()).unwrap();
        s.read_params(s.graph().op_ids()).unwrap();
        assert_eq!(run(&s).unwrap(), want);

        let captured = |s: &Session| {
            let mut state = s.new_state(1, 16);
            state.reserve().unwrap();
            let capture = Capture {
                inputs: &inputs(4, 1),
                state: &state,
                windows: &[],
                greedy: None::<Greedy>,
            };
            let mut step = s.capture(&s.host_plan(), &capture).unwrap();
            step.replay(&mut state, &crate::Alone).unwrap();
            let made = step.read(&s.graph().outputs[0].0).unwrap();
            let made = made.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            made.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let tensors = captured(&Session::new(decoder(), &Random).unwrap());
        assert_eq!(captured(&s), tensors);
        assert_eq!(embed_reads(&source), 0);

        let ids = Tensor::from_vec(vec![3u32, 11], (1, 2), &Device::Cpu).unwrap();
        let at = Tensor::from_vec(vec![0u32, 1], 2, &Device::Cpu).unwrap();
        let beyond = s.run(&s.host_plan(), &[ids, at], &mut s.new_state(1, 0), None);
        let said = beyond.unwrap_err().to_string();
        assert!(said.contains("id 11") && said.contains("of 11"), "{said}");

        // Whoever needs the tensor gets it, and then everybody does.
        let stored = s.stored();
        let embed = stored.iter().find(|p| p.param.path == "embed").unwrap();
        assert!(s.unread(embed));
        s.param(&embed.param).unwrap().unwrap();
        assert!(s.holds(embed) && s.table(embed.values[0]).unwrap().is_none());
        assert_eq!((run(&s).unwrap(), embed_reads(&source)), (want, 1));
    }

    #[test]
    fn a_table_of_another_shape_is_not_used() {
        let source = Arc::new(Tables {
            odd: true,
            ..Tables::default()
        });
        let s = Session::reading_later(decoder(), source.clone()).unwrap();
        let want = run(&Session::new(decoder(), &Random).unwrap()).unwrap();
        assert_eq!((run(&s).unwrap(), embed_reads(&source)), (want, 1));
    }

    #[test]
    fn a_captured_step_reads_what_comes_back_and_keeps_what_it_has() {
        let s = Session::new(decoder(), &Random).unwrap();
        let from: Arc<dyn Originals> = Arc::new(File::default());
        let mut state = s.new_state(1, 16);
        state.reserve().unwrap();
        let inputs = inputs(0, 1);
        let capture = || {
            s.capture(
                &s.host_plan(),
                &Capture {
                    inputs: &inputs,
                    state: &state,
                    windows: &[],
                    greedy: None::<Greedy>,
                },
            )
        };
        let all = s.stored();
        let release = |from| all.iter().for_each(|p| s.release(&p.param, from));
        release(Some(&from));
        let mut step = capture().unwrap();
        assert!(all.iter().all(|p| s.holds(p)));
        release(None);
        assert!(matches!(capture(), Err(GraphError::Released { .. })));
        step.replay(&mut state, &crate::Alone).unwrap();
        assert_eq!(state.len(), 1);
    }
}
