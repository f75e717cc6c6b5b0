//! Everything `bind` gets, by name.
//!
//! Owns the reading of [`BindArgs`] and the comparison with a declaration
//! ([`BindRequest::admitted_by`]), so that a plugin's `bind` starts with checked names, shapes and
//! variants and only packs.

use crate::abi::{BindArgs, Contract, DType, TensorView};
use crate::describe::{operation_of, BindParams, FormDecl, ProbeShapes};
use crate::owned::read_str;
use crate::sdk::{Failure, PackedRows, Tensor, Weight};

/// A request to bind one form. Weights and statistics are borrowed for the length of `bind`.
#[derive(Debug)]
pub struct BindRequest<'a> {
    /// Name of the form.
    pub form: &'a str,
    /// Device to bind on; 0 is the CPU.
    pub device: u32,
    /// Span of the structure's dataflow.
    pub span: &'a str,
    /// Structure, variant, captured attributes, dims, and names of inputs, outputs and states in
    /// call order.
    pub params: BindParams,
    /// What the bound form may rely on for every call.
    pub contract: &'a Contract,
    weights: Vec<(&'a str, Tensor<'a>)>,
    statistics: Vec<(&'a str, Tensor<'a>)>,
}

impl<'a> BindRequest<'a> {
    /// A request without weights and statistics; what a plugin's own unit tests start from.
    pub fn new(
        form: &'a str,
        span: &'a str,
        params: BindParams,
        contract: &'a Contract,
    ) -> BindRequest<'a> {
        BindRequest {
            form,
            device: 0,
            span,
            params,
            contract,
            weights: Vec::new(),
            statistics: Vec::new(),
        }
    }

    /// Adds a weight.
    #[must_use]
    pub fn with_weight(mut self, slot: &'a str, weight: Tensor<'a>) -> Self {
        self.weights.push((slot, weight));
        self
    }

    /// Adds a statistic under its full name, `point|statistic|granularity`.
    #[must_use]
    pub fn with_statistic(mut self, name: &'a str, statistic: Tensor<'a>) -> Self {
        self.statistics.push((name, statistic));
        self
    }

    /// Reads what came over the boundary.
    ///
    /// # Safety
    /// `args` is as the ABI says: arrays of the stated lengths, views and texts valid during `'a`.
    pub unsafe fn from_raw(args: &'a BindArgs) -> Result<Self, Failure> {
        let expected = size_of::<BindArgs>();
        if (args.struct_size as usize) < expected {
            let text = format!(
                "bind args of {} bytes, 1.0 has {expected}",
                args.struct_size
            );
            return Err(Failure::invalid("argument", text));
        }
        // SAFETY: promised by the caller.
        let contract: &'a Contract = unsafe { args.contract.as_ref() }
            .ok_or_else(|| Failure::invalid("argument", "the contract is null"))?;
        if (contract.struct_size as usize) < size_of::<Contract>() {
            let text = format!("a contract of {} bytes", contract.struct_size);
            return Err(Failure::invalid("argument", text));
        }
        // SAFETY: promised by the caller, for all texts and arrays below.
        unsafe {
            let params = read_str(args.params, "params")?;
            Ok(BindRequest {
                form: read_str(args.form, "form")?,
                device: args.device,
                span: read_str(args.span, "span")?,
                params: serde_json::from_str(params)
                    .map_err(|e| Failure::invalid("params", format!("params: {e}")))?,
                contract,
                weights: named(args.weight_names, args.weights, args.n_weights, "weights")?,
                statistics: named(
                    args.statistic_names,
                    args.statistics,
                    args.n_statistics,
                    "statistics",
                )?,
            })
        }
    }

    /// The weight of a slot; `None` when the slot is optional and absent, or not listed.
    pub fn weight(&self, slot: &str) -> Option<Tensor<'a>> {
        self.weights
            .iter()
            .find(|(name, _)| *name == slot)
            .and_then(|(_, weight)| weight.present())
    }

    /// The weight of a slot this form cannot do without: else `weight_missing`.
    pub fn required_weight(&self, slot: &str) -> Result<Tensor<'a>, Failure> {
        self.weight(slot).ok_or_else(|| {
            Failure::refused("weight_missing", format!("slot `{slot}` has no weight"))
        })
    }

    /// As [`BindRequest::required_weight`], and its dims are `dims`: else `dims_inconsistent`.
    pub fn weight_of_dims(&self, slot: &str, dims: &[usize]) -> Result<Tensor<'a>, Failure> {
        let weight = self.required_weight(slot)?;
        if !weight
            .dims()
            .iter()
            .copied()
            .eq(dims.iter().map(|dim| *dim as i64))
        {
            let text = format!(
                "slot `{slot}` has dims {:?}, expected {dims:?}",
                weight.dims()
            );
            return Err(Failure::refused("dims_inconsistent", text));
        }
        Ok(weight)
    }

    /// The weight of a product's slot as the host gives it, plain or packed: `None` as for
    /// [`BindRequest::weight`]. A packed one is `[N, bytes of a row]` in `u8`: else `view_dims`.
    pub fn product_weight(&self, slot: &str) -> Result<Option<Weight<'a>>, Failure> {
        let Some(tensor) = self.weight(slot) else {
            return Ok(None);
        };
        let Some(packed) = self.params.packed.get(slot) else {
            return Ok(Some(Weight::Plain(tensor)));
        };
        let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let rows = PackedRows::new(
            packed.format,
            size(packed.n),
            size(packed.k),
            tensor.as_codes()?,
        )?;
        Ok(Some(Weight::Packed(rows)))
    }

    /// As [`BindRequest::product_weight`], of a slot this form cannot do without: else
    /// `weight_missing`.
    pub fn required_product_weight(&self, slot: &str) -> Result<Weight<'a>, Failure> {
        self.product_weight(slot)?.ok_or_else(|| {
            Failure::refused("weight_missing", format!("slot `{slot}` has no weight"))
        })
    }

    /// All weights with their slots, in the host's order, absent ones included.
    pub fn weights(&self) -> &[(&'a str, Tensor<'a>)] {
        &self.weights
    }

    /// Values of a statistic: one for granularity `tensor`, one a channel for `channel`. Missing or
    /// empty: `statistic_missing`.
    pub fn statistic(
        &self,
        point: &str,
        statistic: &str,
        granularity: &str,
    ) -> Result<Vec<f32>, Failure> {
        let wanted = format!("{point}|{statistic}|{granularity}");
        let found = self.statistics.iter().find(|(name, _)| *name == wanted);
        let values = match found.and_then(|(_, values)| values.present()) {
            Some(values) => values.to_f32_vec()?,
            None => Vec::new(),
        };
        if values.is_empty() {
            let names: Vec<&str> = self.statistics.iter().map(|(name, _)| *name).collect();
            let text = format!("no `{wanted}` among {names:?}");
            return Err(Failure::refused("statistic_missing", text));
        }
        Ok(values)
    }

    /// The one value of a per-tensor statistic, finite and not negative.
    pub fn scalar_statistic(&self, point: &str, statistic: &str) -> Result<f32, Failure> {
        match self.statistic(point, statistic, "tensor")?[..] {
            [value] if value.is_finite() && value >= 0.0 => Ok(value),
            ref other => {
                let text = format!("`{point}|{statistic}|tensor` is {other:?}");
                Err(Failure::refused("statistic_missing", text))
            }
        }
    }

    /// Size of a symbol of the structure: else `param_missing`.
    pub fn dim(&self, symbol: &str) -> Result<usize, Failure> {
        let size = self.params.dims.get(symbol).copied();
        size.and_then(|size| usize::try_from(size).ok())
            .ok_or_else(|| Failure::refused("param_missing", format!("dim `{symbol}`")))
    }

    /// Value of a variant axis: else `param_missing`.
    pub fn axis(&self, axis: &str) -> Result<&str, Failure> {
        let value = self.params.variant.get(axis).map(String::as_str);
        value.ok_or_else(|| Failure::refused("param_missing", format!("axis `{axis}`")))
    }

    /// A captured numeric attribute: else `param_missing`.
    pub fn number(&self, name: &str) -> Result<f64, Failure> {
        let value = self
            .params
            .params
            .get(name)
            .and_then(serde_json::Value::as_f64);
        value.ok_or_else(|| Failure::refused("param_missing", format!("number `{name}`")))
    }

    /// A captured numeric attribute that may be absent or null: `param_missing` when it is neither
    /// that nor a number.
    pub fn optional_number(&self, name: &str) -> Result<Option<f64>, Failure> {
        match self.params.params.get(name) {
            None | Some(serde_json::Value::Null) => Ok(None),
            Some(_) => self.number(name).map(Some),
        }
    }

    /// The operation of the host's graph that is asked for, where it is no form of a structure.
    pub fn operation(&self) -> Option<&str> {
        operation_of(&self.params.structure, self.form)
    }

    /// [`DType`] of the boundary: else `boundary_dtype`.
    pub fn boundary(&self) -> Result<DType, Failure> {
        DType::from_id(self.contract.dtype).ok_or_else(|| {
            let text = format!("unknown type id {}", self.contract.dtype);
            Failure::refused("boundary_dtype", text)
        })
    }

    /// Compares the request with the declaration of its form: structure version, span, variant,
    /// boundary dtype, packed formats and dims. Rows are not compared: a call outside them is the host's to
    /// dispatch.
    pub fn admitted_by(&self, decl: &FormDecl) -> Result<(), Failure> {
        let params = &self.params;
        if params.structure != decl.structure || !decl.spec_versions.contains(&params.version) {
            let text = format!(
                "{} v{}, the form serves {} v{:?}",
                params.structure, params.version, decl.structure, decl.spec_versions
            );
            return Err(Failure::refused("structure_version", text));
        }
        for (slot, packed) in &params.packed {
            if !decl.packed.contains(&packed.format) {
                let names: Vec<&str> = decl.packed.iter().map(|f| f.name()).collect();
                let text = format!(
                    "slot `{slot}` holds {} rows, the form takes {names:?}",
                    packed.format
                );
                return Err(Failure::refused("packed_format", text));
            }
        }
        let boundary = self.boundary()?.name();
        if !decl.dtypes.iter().any(|dtype| dtype == boundary) {
            let text = format!("{boundary}, the form accepts {:?}", decl.dtypes);
            return Err(Failure::refused("boundary_dtype", text));
        }
        decl.admits(&ProbeShapes {
            structure: params.structure.clone(),
            span: self.span.into(),
            rows: Vec::new(),
            dims: params.dims.clone(),
            variant: params.variant.clone(),
        })
    }
}

/// # Safety
/// `names` and `views` have `n` valid elements, whose memory is valid during `'a`.
unsafe fn named<'a>(
    names: *const crate::abi::Str,
    views: *const TensorView,
    n: usize,
    what: &str,
) -> Result<Vec<(&'a str, Tensor<'a>)>, Failure> {
    if n == 0 {
        return Ok(Vec::new());
    }
    if names.is_null() || views.is_null() {
        return Err(Failure::invalid(
            "argument",
            format!("{n} {what} without an array"),
        ));
    }
    // SAFETY: promised by the caller.
    let pairs = unsafe {
        std::slice::from_raw_parts(names, n)
            .iter()
            .zip(std::slice::from_raw_parts(views, n))
    };
    pairs
        .map(|(name, view)| {
            // SAFETY: promised by the caller.
            let name = unsafe { read_str(*name, what) }?;
            // SAFETY: promised by the caller; weights and statistics are written by nobody during
            // `bind`.
            let tensor = unsafe { Tensor::from_view(view) }.map_err(|f| Failure {
                message: format!("{name}: {}", f.message),
                ..f
            })?;
            Ok((name, tensor))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Str;
    use crate::describe::{DimBand, PackedSlot, WeightFormat};
    use crate::formats::BlockFormat;

    const CONTRACT: Contract = Contract {
        struct_size: size_of::<Contract>() as u32,
        dtype: DType::F32 as u32,
        row_capacity: 8,
        rows_exact: 0,
        device: 0,
        flags: 0,
    };

    fn params() -> BindParams {
        BindParams {
            structure: "scale_rows".into(),
            version: 1,
            variant: [("mode".to_string(), "plain".to_string())].into(),
            params: [("eps".to_string(), serde_json::json!(1e-5))].into(),
            dims: [("K".to_string(), 4)].into(),
            ..BindParams::default()
        }
    }

    fn decl() -> FormDecl {
        let mut decl = FormDecl::new("scale_rows", "plain", "none");
        decl.spans = vec!["rows".into()];
        decl.dtypes = vec!["f32".into()];
        decl.variants = [("mode".to_string(), vec!["plain".to_string()])].into();
        decl.band.dims = [(
            "K".to_string(),
            DimBand {
                min: 1,
                max: 64,
                multiple_of: 4,
            },
        )]
        .into();
        decl.weight_format = WeightFormat::None;
        decl
    }

    fn code<T: std::fmt::Debug>(result: Result<T, Failure>) -> String {
        result.err().map_or("ok".into(), |failure| failure.code)
    }

    #[test]
    fn the_declaration_admits_what_it_names() {
        let request = |edit: fn(&mut BindParams)| {
            let mut params = params();
            edit(&mut params);
            code(BindRequest::new("plain", "rows", params, &CONTRACT).admitted_by(&decl()))
        };
        assert_eq!(request(|_| ()), "ok");
        assert_eq!(request(|p| p.version = 2), "structure_version");
        assert_eq!(
            request(|p| p.structure = "other".into()),
            "structure_version"
        );
        assert_eq!(
            request(|p| *p.dims.get_mut("K").expect("K") = 6),
            "envelope"
        );
        assert_eq!(
            request(|p| *p.dims.get_mut("K").expect("K") = 128),
            "envelope"
        );
        assert_eq!(request(|p| p.dims.clear()), "envelope");
        assert_eq!(
            request(|p| *p.variant.get_mut("mode").expect("mode") = "x".into()),
            "format_no_variant"
        );
        assert_eq!(request(|p| p.variant.clear()), "ok");
        let other_span = BindRequest::new("plain", "columns", params(), &CONTRACT);
        assert_eq!(code(other_span.admitted_by(&decl())), "span_unknown");
        let bf16 = Contract {
            dtype: DType::Bf16 as u32,
            ..CONTRACT
        };
        let request = BindRequest::new("plain", "rows", params(), &bf16);
        assert_eq!(code(request.admitted_by(&decl())), "boundary_dtype");
    }

    #[test]
    fn packed_rows_are_taken_where_they_are_declared() {
        let data: Vec<u8> = [0_u8; 68].into();
        let slot = |n| PackedSlot {
            format: BlockFormat::Q8_0,
            n,
            k: 32,
        };
        let request = |n| {
            let mut params = params();
            params.packed = [("w".to_string(), slot(n))].into();
            // SAFETY: `data` outlives every request made here.
            let view = unsafe {
                Tensor::from_view(&crate::abi::TensorView {
                    data: data.as_ptr().cast_mut().cast(),
                    dtype: DType::U8 as u32,
                    rank: 2,
                    dims: [2, 34, 0, 0, 0, 0, 0, 0],
                    strides: [34, 1, 0, 0, 0, 0, 0, 0],
                    ..crate::abi::TensorView::ABSENT
                })
            };
            let request = BindRequest::new("plain", "rows", params, &CONTRACT);
            request.with_weight("w", view.expect("a view"))
        };
        let good = request(2);
        let weight = good.required_product_weight("w").expect("rows");
        assert_eq!(weight.dims(), Ok([32, 2]));
        assert_eq!(code(request(3).product_weight("w")), "view_dims");
        assert_eq!(code(good.required_product_weight("v")), "weight_missing");
        assert_eq!(code(good.admitted_by(&decl())), "packed_format");
        let mut takes = decl();
        takes.packed = vec![BlockFormat::Q8_0];
        assert_eq!(code(good.admitted_by(&takes)), "ok");
    }

    #[test]
    fn parts_are_found_by_name_or_refused_by_name() {
        let (w, amax) = ([1.0, 2.0, 3.0, 4.0], [2.5]);
        let request = BindRequest::new("plain", "rows", params(), &CONTRACT)
            .with_weight("w", Tensor::from_f32(&w, &[4]).expect("fits"))
            .with_weight("b", Tensor::ABSENT)
            .with_statistic("x|amax|tensor", Tensor::from_f32(&amax, &[]).expect("fits"));
        assert_eq!(
            request.required_weight("w").and_then(|w| w.to_f32_vec()),
            Ok(w.to_vec())
        );
        assert!(request.weight("b").is_none() && request.weight("c").is_none());
        assert_eq!(code(request.required_weight("b")), "weight_missing");
        assert_eq!(code(request.weight_of_dims("w", &[4])), "ok");
        assert_eq!(
            code(request.weight_of_dims("w", &[2, 2])),
            "dims_inconsistent"
        );
        assert_eq!(request.scalar_statistic("x", "amax"), Ok(2.5));
        assert_eq!(
            code(request.statistic("x", "amax", "channel")),
            "statistic_missing"
        );
        assert_eq!(
            (request.dim("K"), request.axis("mode")),
            (Ok(4), Ok("plain"))
        );
        assert_eq!(request.number("eps"), Ok(1e-5));
        assert_eq!(code(request.number("gain")), "param_missing");
        assert_eq!(code(request.dim("N")), "param_missing");
    }

    #[test]
    fn raw_arguments_are_checked() {
        let json = serde_json::to_string(&params()).expect("serialises");
        let args = BindArgs {
            struct_size: size_of::<BindArgs>() as u32,
            device: 0,
            form: Str::new("plain"),
            span: Str::new("rows"),
            weight_names: std::ptr::null(),
            weights: std::ptr::null(),
            n_weights: 0,
            statistic_names: std::ptr::null(),
            statistics: std::ptr::null(),
            n_statistics: 0,
            params: Str::new(&json),
            contract: &CONTRACT,
        };
        // SAFETY: everything the args point at lives in this test; malformed parts are seen before
        // they are read.
        let read = |args: &BindArgs| unsafe { BindRequest::from_raw(args) }.map(|r| r.params);
        assert_eq!(read(&args), Ok(params()));
        assert_eq!(
            code(read(&BindArgs {
                struct_size: 8,
                ..args
            })),
            "argument"
        );
        assert_eq!(
            code(read(&BindArgs {
                contract: std::ptr::null(),
                ..args
            })),
            "argument"
        );
        assert_eq!(
            code(read(&BindArgs {
                n_weights: 1,
                ..args
            })),
            "argument"
        );
        assert_eq!(
            code(read(&BindArgs {
                params: Str::new("{"),
                ..args
            })),
            "params"
        );
    }
}
