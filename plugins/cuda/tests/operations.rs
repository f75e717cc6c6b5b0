//! Host operations on a GPU that is not there: bit for bit what the host makes, for what repeats and for what does not.

#![allow(clippy::expect_used, clippy::unwrap_used)] // a test that panics has failed

mod common;

use structures_loader::{
    row_capacity, BindSpec, BoundForm, DeviceMemory, Environment, HostTensor, Plugin, PluginDevice,
    PluginError, Registry, ScanMode, ScanOptions,
};
use structures_plugin_api::describe::{operation_form, BindParams};
use structures_plugin_api::DType;

const GPU: u32 = 1;

/// The plugin on the fake driver, and the directory it was loaded from; `None` where the fakes cannot be built.
fn open() -> Option<(Plugin, tempfile::TempDir)> {
    let fakes = common::Fakes::built()?;
    fakes.open();
    let file = "libstructures_plugin_cuda.so";
    let exe = std::env::current_exe().expect("a path");
    let built = exe.ancestors().map(|dir| dir.join(file));
    let built = built.into_iter().find(|p| p.is_file());
    let built = built.expect("the workspace is built");
    let dir = tempfile::tempdir().expect("temporary directory");
    let plugins = dir
        .path()
        .canonicalize()
        .expect("canonical")
        .join("plugins");
    std::fs::create_dir(&plugins).expect("create");
    std::fs::copy(built, plugins.join("gpu.so")).expect("copies");
    let mut options = ScanOptions::new(vec![plugins]);
    options.environment = Environment {
        cache_dir: Some(dir.path().join("loader")),
        ..Environment::default()
    };
    options.mode = ScanMode::InProcess;
    let registry = Registry::scan(&options).expect("scan");
    Some((registry.plugin("cuda").cloned().expect("loads"), dir))
}

fn ramp(n: usize, step: usize) -> Vec<f32> {
    (0..n)
        .map(|i| (i * step % 101) as f32 / 7.0 - 6.0)
        .collect()
}

type Operand<'a> = (&'a str, &'a [f32], &'a [usize]);

/// Attributes of a norm with a weight that is one less than the scale.
fn offset() -> [(String, serde_json::Value); 3] {
    let of = |name: &str, value: serde_json::Value| (name.to_string(), value);
    [
        of("eps", 1e-3.into()),
        of("axes", 1.0.into()),
        of("weight", "offset".into()),
    ]
}

/// Attributes of a transpose.
fn turned(perm: &[usize]) -> [(String, serde_json::Value); 1] {
    [("perm".to_string(), perm.into())]
}

fn bind(
    plugin: &Plugin,
    kind: &str,
    inputs: &[&str],
    weights: &[Operand<'_>],
    device: u32,
) -> Result<BoundForm, PluginError> {
    let params = BindParams {
        inputs: inputs.iter().map(|n| (*n).to_string()).collect(),
        outputs: vec!["y".into()],
        params: match kind {
            "rms_norm" => offset().into(),
            "transpose" => turned(&[0, 2, 1, 3]).into(),
            _ => Default::default(),
        },
        ..BindParams::default()
    };
    let weights: Vec<_> = weights
        .iter()
        .map(|(name, data, dims)| (*name, HostTensor::new(data, dims).expect("fits")))
        .collect();
    plugin.bind(&BindSpec {
        form: &operation_form(kind),
        device,
        span: kind,
        weights: &weights,
        statistics: &[],
        params: &params,
        contract: row_capacity(DType::F32, 64),
    })
}

fn on(device: &PluginDevice, data: &[f32]) -> DeviceMemory {
    let mut memory = device.lease(4 * data.len() as u64).expect("memory");
    memory.copy_in(None, 0, data).expect("copies");
    memory
}

/// One call with operands on the device.
fn call(
    device: &PluginDevice,
    form: &BoundForm,
    operands: &[(&[f32], &[usize])],
    dims: &[usize],
) -> Result<Vec<f32>, PluginError> {
    let held: Vec<DeviceMemory> = operands.iter().map(|(data, _)| on(device, data)).collect();
    let views: Vec<_> = held
        .iter()
        .zip(operands)
        .map(|(memory, (_, dims))| memory.tensor(DType::F32, dims).expect("fits"))
        .collect();
    let mut out = vec![f32::NAN; dims.iter().product()];
    let mut made = on(device, &out);
    {
        let mut results = [made.tensor_mut(DType::F32, dims).expect("fits")];
        form.call_on(device, None, &views, &mut results, &mut [])?;
    }
    made.copy_out(None, 0, &mut out)?;
    Ok(out)
}

#[test]
fn sums_and_products_are_the_hosts_bit_for_bit() {
    let Some((plugin, _dir)) = open() else {
        return;
    };
    let device = plugin.device(GPU).expect("opens");
    type Of = fn(f32, f32) -> f32;
    let f: [(&str, Of); 2] = [("add", |a, b| a + b), ("mul", |a, b| a * b)];
    for (kind, f) in f {
        let form = bind(&plugin, kind, &["a", "b"], &[], GPU).expect("binds");
        // More elements than a block has threads, and no multiple of it.
        let shapes: [(&[usize], &[usize]); 4] = [
            (&[3, 7, 45], &[3, 7, 45]),
            (&[3, 7, 45], &[45]),
            (&[45], &[3, 7, 45]),
            (&[3, 7, 45], &[1, 7, 45]),
        ];
        for (a_dims, b_dims) in shapes {
            let n = |dims: &[usize]| dims.iter().product::<usize>();
            let (a, b) = (ramp(n(a_dims), 13), ramp(n(b_dims), 31));
            let got = call(&device, &form, &[(&a, a_dims), (&b, b_dims)], &[3, 7, 45]);
            let want: Vec<f32> = (0..945)
                .map(|i| f(a[i % a.len()], b[i % b.len()]))
                .collect();
            assert_eq!(got.expect("runs"), want, "{kind} {a_dims:?} {b_dims:?}");
        }
        let scale = ramp(45, 3);
        let stored = bind(&plugin, kind, &["a"], &[("b", &scale, &[45])], GPU).expect("binds");
        assert_eq!(stored.facts().packed_bytes, 180);
        let a = ramp(90, 5);
        let got = call(&device, &stored, &[(&a, &[2, 45])], &[2, 45]).expect("runs");
        let want: Vec<f32> = (0..90).map(|i| f(a[i], scale[i % 45])).collect();
        assert_eq!(got, want);
        let column = ramp(3, 2);
        let refused = call(
            &device,
            &form,
            &[(&ramp(945, 1), &[3, 7, 45]), (&column, &[3, 1, 1])],
            &[3, 7, 45],
        );
        assert_eq!(refused.expect_err("no such kernel").code, "operand_dims");
    }
}

#[test]
fn rows_of_a_table_are_the_hosts_and_an_id_beyond_it_is_no_number() {
    let Some((plugin, _dir)) = open() else {
        return;
    };
    let device = plugin.device(GPU).expect("opens");
    let table = ramp(11 * 300, 17);
    let form = bind(
        &plugin,
        "embedding",
        &["ids"],
        &[("w", &table, &[11, 300])],
        GPU,
    );
    let form = form.expect("binds");
    assert_eq!(form.facts().packed_bytes, 4 * 11 * 300);
    let ids: [i64; 6] = [0, 10, 3, 3, 11, -1];
    let mut given = device.lease(48).expect("memory");
    given.copy_in(None, 0, &ids).expect("copies");
    let mut out = vec![0.0_f32; 6 * 300];
    let mut made = on(&device, &out);
    {
        let ids = given.tensor(DType::I64, &[1, 6]).expect("fits");
        let mut results = [made.tensor_mut(DType::F32, &[1, 6, 300]).expect("fits")];
        form.call_on(&device, None, &[ids], &mut results, &mut [])
            .expect("runs");
    }
    made.copy_out(None, 0, &mut out).expect("copies");
    for (row, id) in out.chunks_exact(300).zip(ids) {
        match usize::try_from(id).ok().filter(|id| *id < 11) {
            Some(id) => assert_eq!(row, &table[id * 300..][..300]),
            None => assert!(row.iter().all(|v| v.is_nan()), "{id}"),
        }
    }
}

#[test]
fn rows_are_normed_to_f32s_precision() {
    let Some((plugin, _dir)) = open() else {
        return;
    };
    let device = plugin.device(GPU).expect("opens");
    // Wider than a block of threads.
    let (x, w) = (ramp(5 * 300, 13), ramp(300, 3));
    for weights in [&[][..], &[("w", &w[..], &[300][..])]] {
        let form = bind(&plugin, "rms_norm", &["x"], weights, GPU).expect("binds");
        let got = call(&device, &form, &[(&x, &[1, 5, 300])], &[1, 5, 300]).expect("runs");
        for (got, x) in got.chunks_exact(300).zip(x.chunks_exact(300)) {
            let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 300.0;
            let by = 1.0 / (mean + 1e-3).sqrt();
            for (i, (got, x)) in got.iter().zip(x).enumerate() {
                let scale = weights.first().map_or(1.0, |_| 1.0 + f64::from(w[i]));
                let want = f64::from(*x) * by * scale;
                let off = (f64::from(*got) - want).abs();
                assert!(off <= 1e-5 * want.abs().max(1e-3), "{got} for {want}");
            }
        }
    }
}

/// Elements of these dims in another order of axes.
fn reordered(x: &[f32], dims: &[usize], perm: &[usize]) -> Vec<f32> {
    let stride = |axis: usize| dims[axis + 1..].iter().product::<usize>();
    let element = |i: usize| {
        let (mut left, mut at) = (i, 0);
        for axis in perm.iter().rev() {
            at += left % dims[*axis] * stride(*axis);
            left /= dims[*axis];
        }
        x[at]
    };
    (0..x.len()).map(element).collect()
}

#[test]
fn elements_in_another_order_are_the_hosts_bit_for_bit() {
    let Some((plugin, _dir)) = open() else {
        return;
    };
    let device = plugin.device(GPU).expect("opens");
    let shapes: [(&[usize], &[usize]); 9] = [
        (&[1, 7, 3, 45], &[0, 2, 1, 3]),
        (&[2, 1, 5, 32], &[0, 2, 1, 3]),
        (&[2, 33, 5], &[2, 1, 0]),
        (&[45, 31], &[1, 0]),
        (&[3, 4, 5, 6], &[3, 1, 0, 2]),
        (&[2, 3, 4, 5, 6], &[4, 2, 0, 3, 1]),
        // Six axes of which two stay together, and one of one.
        (&[2, 3, 4, 5, 2, 3], &[2, 3, 0, 5, 1, 4]),
        (&[2, 3, 1, 2, 3, 2], &[5, 3, 4, 2, 1, 0]),
        (&[300], &[0]),
    ];
    for (dims, perm) in shapes {
        let params = BindParams {
            inputs: vec!["x".into()],
            outputs: vec!["y".into()],
            params: turned(perm).into(),
            ..BindParams::default()
        };
        let form = plugin.bind(&BindSpec {
            form: &operation_form("transpose"),
            device: GPU,
            span: "transpose",
            weights: &[],
            statistics: &[],
            params: &params,
            contract: row_capacity(DType::F32, 64),
        });
        let form = form.expect("binds");
        let x = ramp(dims.iter().product(), 13);
        let made: Vec<usize> = perm.iter().map(|a| dims[*a]).collect();
        let got = call(&device, &form, &[(&x, dims)], &made).expect("runs");
        assert_eq!(got, reordered(&x, dims, perm), "{dims:?} {perm:?}");
    }
    let copy = bind(&plugin, "contiguous", &["x"], &[], GPU).expect("binds");
    let x = ramp(3 * 7 * 45, 11);
    let got = call(&device, &copy, &[(&x, &[3, 7, 45])], &[3, 7, 45]);
    assert_eq!(got.expect("runs"), x);
    let code = |dims: &[usize], made: &[usize]| {
        // A call that is not what was agreed on ends a form.
        let form = bind(&plugin, "transpose", &["x"], &[], GPU).expect("binds");
        let x = ramp(dims.iter().product(), 1);
        let refused = call(&device, &form, &[(&x, dims)], made);
        refused.err().map(|e| e.code)
    };
    assert_eq!(code(&[1, 2, 3, 4], &[1, 3, 2, 4]), None);
    let bad = Some("dims_inconsistent".to_string());
    assert_eq!(code(&[1, 2, 3, 4], &[1, 2, 3, 4]), bad);
    assert_eq!(code(&[2, 3, 4], &[2, 4, 3]), bad);
}

/// The host's choice: the first of the largest, none where no score is finite.
fn first_largest(row: &[f32]) -> i64 {
    if !row.iter().any(|v| v.is_finite()) {
        return -1;
    }
    let numbers = row.iter().copied().filter(|v| !v.is_nan());
    let most = numbers.fold(f32::NEG_INFINITY, f32::max);
    let first = row.iter().position(|v| *v == most);
    first.map_or(-1, |at| at as i64)
}

#[test]
fn of_every_row_the_first_of_the_largest_is_chosen_as_the_host_does() {
    let Some((plugin, _dir)) = open() else {
        return;
    };
    let device = plugin.device(GPU).expect("opens");
    let form = bind(&plugin, "argmax", &["x"], &[], GPU).expect("binds");
    let (nan, low, high) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
    let chosen = |rows: &[Vec<f32>]| -> Vec<i64> {
        let width = rows[0].len();
        let x = on(&device, &rows.concat());
        let mut made = device.lease(8 * rows.len() as u64).expect("memory");
        {
            let x = x.tensor(DType::F32, &[1, rows.len(), width]).expect("fits");
            let y = made.tensor_mut(DType::I64, &[1, rows.len()]).expect("fits");
            form.call_on(&device, None, &[x], &mut [y], &mut [])
                .expect("runs");
        }
        let mut got = vec![7_i64; rows.len()];
        made.copy_out(None, 0, &mut got).expect("copies");
        got
    };
    let mut seed = 1_u32;
    let mut next = move |n: usize| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as usize % n.max(1)
    };
    // Under a warp, a warp, odd ones, a block and more than one piece of it.
    for width in [1, 2, 5, 31, 32, 33, 45, 264, 1000, 1024, 1025, 5003] {
        // Few values, so that most rows have ties.
        let mut row = || -> Vec<f32> { (0..width).map(|_| next(9) as f32 - 4.0).collect() };
        let mut rows: Vec<Vec<f32>> = (0..4).map(|_| row()).collect();
        for value in [nan, low, high, -0.0, f32::MIN, f32::MAX] {
            let mut with = row();
            (0..1 + width / 3).for_each(|i| with[(i * 7 + 3) % width] = value);
            rows.push(with);
            rows.push(vec![value; width]);
        }
        for (all, one) in [
            (nan, low),
            (nan, high),
            (low, high),
            (nan, 0.5),
            (low, f32::MIN),
        ] {
            let mut with = vec![all; width];
            with[width - 1] = one;
            rows.push(with);
        }
        let zeros = (0..width).map(|i| if i % 2 == 0 { -0.0 } else { 0.0 });
        rows.push(zeros.collect());
        let want: Vec<i64> = rows.iter().map(|row| first_largest(row)).collect();
        assert_eq!(chosen(&rows), want, "{width}");
        assert!(want.contains(&-1) && want.iter().any(|at| *at >= 0));
        // The only largest one, wherever it is.
        for at in [0, width / 3, width / 2, width - 1] {
            let mut row = vec![1.0; width];
            row[at] = 2.0;
            assert_eq!(chosen(&[row]), [at as i64], "{width}");
        }
    }
    let x = on(&device, &[1.0; 8]);
    let mut made = device.lease(64).expect("memory");
    let mut refused = |dtype, dims: &[usize]| {
        let form = bind(&plugin, "argmax", &["x"], &[], GPU).expect("binds");
        let x = x.tensor(DType::F32, &[2, 4]).expect("fits");
        let y = made.tensor_mut(dtype, dims).expect("fits");
        let called = form.call_on(&device, None, &[x], &mut [y], &mut []);
        called.err().map(|e| e.code)
    };
    assert_eq!(refused(DType::I64, &[2]), None);
    assert_eq!(refused(DType::F32, &[2]).as_deref(), Some("view_dtype"));
    assert_eq!(
        refused(DType::I64, &[2, 1]).as_deref(),
        Some("dims_inconsistent")
    );
}

/// An append bound as a host binds it.
fn append(plugin: &Plugin) -> BoundForm {
    let params = BindParams {
        inputs: vec!["x".into(), "kv_len".into()],
        states: vec!["region".into()],
        ..BindParams::default()
    };
    let bound = plugin.bind(&BindSpec {
        form: &operation_form("kv_append"),
        device: GPU,
        span: "kv_append",
        weights: &[],
        statistics: &[],
        params: &params,
        contract: row_capacity(DType::F32, 64),
    });
    bound.expect("binds")
}

/// Three heads of room for nine positions of 45 channels, and what a run appends.
const ROOM: [usize; 4] = [1, 3, 9, 45];

fn appended(region: &mut [f32], x: &[f32], rows: usize, valid: usize) {
    for (head, x) in region
        .chunks_exact_mut(9 * 45)
        .zip(x.chunks_exact(rows * 45))
    {
        head[(valid - rows) * 45..valid * 45].copy_from_slice(x);
    }
}

#[test]
fn an_append_writes_the_last_valid_positions_of_every_head_and_nothing_else() {
    let Some((plugin, _dir)) = open() else {
        return;
    };
    let device = plugin.device(GPU).expect("opens");
    let form = append(&plugin);
    let mut want = ramp(ROOM.iter().product(), 11);
    let region = on(&device, &want);
    let length = device.lease(8).expect("memory");
    // A length that does not fit writes nothing.
    for (rows, valid, fits) in [
        (4, 4, true),
        (1, 5, true),
        (4, 9, true),
        (1, 10, false),
        (4, 3, false),
    ] {
        let x = ramp(3 * rows * 45, 7 + valid);
        let given = on(&device, &x);
        length.replace(None, 0, &[valid as i64]).expect("copies");
        let inputs = [
            given.tensor(DType::F32, &[1, 3, rows, 45]).expect("fits"),
            length.tensor(DType::I64, &[]).expect("fits"),
        ];
        let mut states = [region.state(DType::F32, &ROOM).expect("fits")];
        form.call_on(&device, None, &inputs, &mut [], &mut states)
            .expect("runs");
        if fits {
            appended(&mut want, &x, rows, valid);
        }
        let mut got = vec![0.0_f32; want.len()];
        region.copy_out(None, 0, &mut got).expect("copies");
        assert_eq!(got, want, "{rows} rows, {valid} valid");
    }
}

#[test]
fn what_is_recorded_is_done_when_it_is_launched_on_what_lies_there_then() {
    let Some((plugin, _dir)) = open() else {
        return;
    };
    let device = plugin.device(GPU).expect("opens");
    let (form, sum) = (append(&plugin), bind(&plugin, "add", &["a", "b"], &[], GPU));
    let choice = bind(&plugin, "argmax", &["x"], &[], GPU).expect("binds");
    let turn = bind(&plugin, "transpose", &["x"], &[], GPU).expect("binds");
    let sum = sum.expect("binds");
    let turned = on(&device, &[0.0; 135]);
    let chosen = device.lease(24).expect("memory");
    chosen.replace(None, 0, &[-9_i64; 3]).expect("copies");
    let mut want = ramp(ROOM.iter().product(), 11);
    let region = on(&device, &want);
    let length = device.lease(8).expect("memory");
    let x = on(&device, &ramp(135, 3));
    let mut twice = on(&device, &vec![0.0; 135]);
    let dims = [1, 3, 1, 45];
    let mut step = || {
        {
            let mut made = [twice.tensor_mut(DType::F32, &dims).expect("fits")];
            let operand = x.tensor(DType::F32, &dims).expect("fits");
            sum.call_on(&device, None, &[operand, operand], &mut made, &mut [])?;
        }
        let inputs = [
            twice.tensor(DType::F32, &dims).expect("fits"),
            length.tensor(DType::I64, &[]).expect("fits"),
        ];
        let mut states = [region.state(DType::F32, &ROOM).expect("fits")];
        form.call_on(&device, None, &inputs, &mut [], &mut states)?;
        // `[1, 3, 1, 45]` turned is `[1, 1, 3, 45]`.
        let mut made = [turned.state(DType::F32, &[1, 1, 3, 45]).expect("fits")];
        turn.call_on(&device, None, &inputs[..1], &mut made, &mut [])?;
        let scores = turned.tensor(DType::F32, &[1, 1, 3, 45]).expect("fits");
        let mut made = [chosen.state(DType::I64, &[1, 1, 3]).expect("fits")];
        choice.call_on(&device, None, &[scores], &mut made, &mut [])
    };
    length.replace(None, 0, &[1_i64]).expect("copies");
    let (noted, recording) = device.record(None, &mut step).expect("records");
    noted.expect("is noted");
    let recording = recording.expect("a recording");
    let read = || {
        let mut got = vec![0.0_f32; ROOM.iter().product()];
        region.copy_out(None, 0, &mut got).expect("copies");
        got
    };
    let choices = || {
        let mut got = [0_i64; 3];
        chosen.copy_out(None, 0, &mut got).expect("copies");
        got
    };
    assert_eq!(read(), want, "a recorded call does nothing");
    assert_eq!(choices(), [-9; 3]);
    for valid in 1..=3 {
        let values = ramp(135, 5 * valid);
        x.replace(None, 0, &values).expect("copies");
        length.replace(None, 0, &[valid as i64]).expect("copies");
        recording.launch(None).expect("launches");
        let values: Vec<f32> = values.iter().map(|v| v + v).collect();
        appended(&mut want, &values, 1, valid);
        assert_eq!(read(), want, "{valid}");
        let first: Vec<i64> = values.chunks(45).map(first_largest).collect();
        assert_eq!(choices().as_slice(), first);
    }
    // What a recording cannot hold is refused by name, and so is its end; the forms are as sound as before.
    let spoilt = |what: &dyn Fn() -> Option<String>, code: &str| {
        let (found, end) = device.record(None, what).expect("records");
        assert_eq!(found.as_deref(), Some(code));
        let end = end.err().map(|e| e.code);
        assert_eq!(end.as_deref(), Some("capture_spoilt"));
    };
    spoilt(
        &|| device.alloc(64, 64).err().map(|e| e.code),
        "capture_alloc",
    );
    spoilt(
        &|| length.replace(None, 0, &[0_i64]).err().map(|e| e.code),
        "capture_wait",
    );
    step().expect("runs");
}

#[test]
fn what_is_not_declared_and_the_cpu_are_refused_before_the_plugin_is_asked() {
    let Some((plugin, _dir)) = open() else {
        return;
    };
    let code = |kind: &str, device| {
        let bound = bind(&plugin, kind, &["a", "b"], &[], device);
        bound.err().map(|e| e.code)
    };
    assert_eq!(code("add", GPU), None);
    assert_eq!(code("rope", GPU).as_deref(), Some("form_unknown"));
    assert_eq!(code("add", 0).as_deref(), Some("form_unknown"));
}
