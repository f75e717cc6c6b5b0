//! How one tensor is stored and how it becomes f32.
//!
//! Kept dtypes are kept (a checkpoint may mix them); widening happens when a tensor is loaded for execution, and
//! that is also where NaN and infinity are found.

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};
use half::{bf16, f16};

/// A stored element type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum StoredType {
    F64,
    F32,
    F16,
    Bf16,
    /// Known, readable in size, but not a weight this version executes.
    Other {
        name: &'static str,
        bits: usize,
    },
    /// A block type of a GGUF file.
    Ggml(GgmlDType),
    /// One that is known in size and that nothing here widens.
    Blocks {
        name: &'static str,
        elements: usize,
        bytes: usize,
    },
}

/// The element types of the safetensors format: name, size in bits.
const SAFETENSORS: &[(&str, StoredType)] = &[
    ("F64", StoredType::F64),
    ("F32", StoredType::F32),
    ("F16", StoredType::F16),
    ("BF16", StoredType::Bf16),
    ("BOOL", other("bool", 8)),
    ("U8", other("u8", 8)),
    ("I8", other("i8", 8)),
    ("U16", other("u16", 16)),
    ("I16", other("i16", 16)),
    ("U32", other("u32", 32)),
    ("I32", other("i32", 32)),
    ("U64", other("u64", 64)),
    ("I64", other("i64", 64)),
    ("F8_E5M2", other("e5m2", 8)),
    ("F8_E4M3", other("e4m3", 8)),
    ("F8_E8M0", other("e8m0", 8)),
    ("F6_E2M3", other("e2m3", 6)),
    ("F6_E3M2", other("e3m2", 6)),
    ("F4", other("e2m1", 4)),
    ("C64", other("c64", 64)),
];

const fn other(name: &'static str, bits: usize) -> StoredType {
    StoredType::Other { name, bits }
}

/// The element types of the GGUF format that candle reads, by their number in the file.
const GGML: &[(u32, GgmlDType, &str)] = &[
    (0, GgmlDType::F32, "f32"),
    (1, GgmlDType::F16, "f16"),
    (2, GgmlDType::Q4_0, "q4_0"),
    (3, GgmlDType::Q4_1, "q4_1"),
    (6, GgmlDType::Q5_0, "q5_0"),
    (7, GgmlDType::Q5_1, "q5_1"),
    (8, GgmlDType::Q8_0, "q8_0"),
    (9, GgmlDType::Q8_1, "q8_1"),
    (10, GgmlDType::Q2K, "q2_k"),
    (11, GgmlDType::Q3K, "q3_k"),
    (12, GgmlDType::Q4K, "q4_k"),
    (13, GgmlDType::Q5K, "q5_k"),
    (14, GgmlDType::Q6K, "q6_k"),
    (15, GgmlDType::Q8K, "q8_k"),
    (30, GgmlDType::BF16, "bf16"),
];

/// Those that it does not: elements and bytes of a block. Their tensors are described, not loaded.
const UNREAD: &[(u32, StoredType)] = &[
    (16, blocks("iq2_xxs", 256, 66)),
    (17, blocks("iq2_xs", 256, 74)),
    (18, blocks("iq3_xxs", 256, 98)),
    (19, blocks("iq1_s", 256, 50)),
    (20, blocks("iq4_nl", 32, 18)),
    (21, blocks("iq3_s", 256, 110)),
    (22, blocks("iq2_s", 256, 82)),
    (23, blocks("iq4_xs", 256, 136)),
    (24, other("i8", 8)),
    (25, other("i16", 16)),
    (26, other("i32", 32)),
    (27, other("i64", 64)),
    (28, StoredType::F64),
    (29, blocks("iq1_m", 256, 56)),
    (34, blocks("tq1_0", 256, 54)),
    (35, blocks("tq2_0", 256, 66)),
    (39, blocks("mxfp4", 32, 17)),
    (40, blocks("nvfp4", 64, 36)),
    (41, blocks("q1_0", 128, 18)),
];

const fn blocks(name: &'static str, elements: usize, bytes: usize) -> StoredType {
    StoredType::Blocks {
        name,
        elements,
        bytes,
    }
}

impl StoredType {
    /// The type of this name in a safetensors header.
    pub(crate) fn from_safetensors(name: &str) -> Option<Self> {
        SAFETENSORS
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, t)| *t)
    }

    /// All names [`Self::from_safetensors`] knows.
    pub(crate) fn safetensors_names() -> String {
        let names: Vec<&str> = SAFETENSORS.iter().map(|(n, _)| *n).collect();
        names.join(", ")
    }

    /// The type of this number in a GGUF header.
    pub(crate) fn from_ggml(number: u32) -> Option<Self> {
        let read = GGML.iter().find(|(n, ..)| *n == number);
        let unread = || UNREAD.iter().find(|(n, _)| *n == number).map(|(_, t)| *t);
        read.map(|(_, t, _)| StoredType::Ggml(*t)).or_else(unread)
    }

    /// All numbers [`Self::from_ggml`] knows, with their names.
    pub(crate) fn ggml_names() -> String {
        let read = GGML.iter().map(|(n, _, s)| format!("{n} ({s})"));
        let unread = UNREAD.iter().map(|(n, t)| format!("{n} ({})", t.name()));
        read.chain(unread).collect::<Vec<_>>().join(", ")
    }

    /// Its name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            StoredType::F64 => "f64",
            StoredType::F32 => "f32",
            StoredType::F16 => "f16",
            StoredType::Bf16 => "bf16",
            StoredType::Other { name, .. } | StoredType::Blocks { name, .. } => name,
            StoredType::Ggml(t) => GGML
                .iter()
                .find(|(_, g, _)| *g == t)
                .map_or("ggml", |(.., name)| name),
        }
    }

    /// Bytes of a tensor of these dims; `None` when the dims do not fit the type's blocks or overflow.
    pub(crate) fn bytes(self, dims: &[usize]) -> Option<usize> {
        let count = dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
        let bits = match self {
            StoredType::F64 => 64,
            StoredType::F32 => 32,
            StoredType::F16 | StoredType::Bf16 => 16,
            StoredType::Other { bits, .. } => bits,
            StoredType::Ggml(t) => {
                let row = dims.last().copied().unwrap_or(1);
                if row % t.block_size() != 0 {
                    return None;
                }
                return (count / t.block_size()).checked_mul(t.type_size());
            }
            StoredType::Blocks {
                elements, bytes, ..
            } => {
                let row = dims.last().copied().unwrap_or(1);
                let whole = row.is_multiple_of(elements);
                return whole.then(|| (count / elements).checked_mul(bytes))?;
            }
        };
        let bits = count.checked_mul(bits)?;
        (bits % 8 == 0).then_some(bits / 8)
    }

    /// Whether [`Self::widen`] can read it.
    pub(crate) fn is_weight(self) -> bool {
        !matches!(self, StoredType::Other { .. } | StoredType::Blocks { .. })
    }

    /// The values as f32. `bytes` has the length [`Self::bytes`] gives for `dims`, which are not empty.
    pub(crate) fn widen(self, bytes: Vec<u8>, dims: &[usize]) -> candle_core::Result<Tensor> {
        let values: Vec<f32> = match self {
            StoredType::F64 => each(&bytes, |b: [u8; 8]| f64::from_le_bytes(b) as f32),
            StoredType::F32 => each(&bytes, f32::from_le_bytes),
            StoredType::F16 => each(&bytes, |b: [u8; 2]| f16::from_le_bytes(b).to_f32()),
            StoredType::Bf16 => each(&bytes, |b: [u8; 2]| bf16::from_le_bytes(b).to_f32()),
            StoredType::Other { name, .. } | StoredType::Blocks { name, .. } => {
                candle_core::bail!("{name} is not a type of weights")
            }
            StoredType::Ggml(GgmlDType::F32) => each(&bytes, f32::from_le_bytes),
            StoredType::Ggml(t) => {
                let storage = QStorage::from_data(bytes.into(), &Device::Cpu, t)?;
                return QTensor::new(storage, dims)?.dequantize(&Device::Cpu);
            }
        };
        Tensor::from_vec(values, dims, &Device::Cpu)
    }
}

fn each<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    let mut word = [0u8; N];
    bytes
        .chunks_exact(N)
        .map(|chunk| {
            word.copy_from_slice(chunk);
            f(word)
        })
        .collect()
}

/// The first value that is not finite: how many there are, its flat index, itself.
pub(crate) fn first_non_finite(values: &[f32]) -> Option<(usize, usize, f32)> {
    let first = values.iter().position(|v| !v.is_finite())?;
    let count = values[first..].iter().filter(|v| !v.is_finite()).count();
    Some((count, first, values[first]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_blocks_and_bits() {
        assert_eq!(StoredType::Bf16.bytes(&[3, 5]), Some(30));
        assert_eq!(StoredType::Ggml(GgmlDType::Q4_1).bytes(&[2, 64]), Some(80));
        assert_eq!(StoredType::Ggml(GgmlDType::Q4_1).bytes(&[64, 2]), None);
        assert_eq!(StoredType::F32.bytes(&[usize::MAX, 2]), None);
        assert_eq!(other("e2m1", 4).bytes(&[3]), None);
        let iq = StoredType::from_ggml(23).unwrap();
        assert_eq!((iq.name(), iq.is_weight()), ("iq4_xs", false));
        assert_eq!(iq.bytes(&[2, 512]), Some(544));
        assert_eq!(iq.bytes(&[512, 2]), None);
        let numbers: Vec<u32> = (0..64)
            .filter(|n| StoredType::from_ggml(*n).is_some())
            .collect();
        assert_eq!(numbers.len(), GGML.len() + UNREAD.len());
    }

    #[test]
    fn every_float_type_widens() {
        let x = [1.5f32, -0.25, 3.0, 0.0];
        for (t, bytes) in [
            (
                StoredType::F32,
                x.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>(),
            ),
            (
                StoredType::F64,
                x.iter().flat_map(|v| f64::from(*v).to_le_bytes()).collect(),
            ),
            (
                StoredType::F16,
                x.iter()
                    .flat_map(|v| f16::from_f32(*v).to_le_bytes())
                    .collect(),
            ),
            (
                StoredType::Bf16,
                x.iter()
                    .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
                    .collect(),
            ),
        ] {
            assert_eq!(t.bytes(&[2, 2]), Some(bytes.len()), "{t:?}");
            let got = t.widen(bytes, &[2, 2]).unwrap().flatten_all().unwrap();
            assert_eq!(got.to_vec1::<f32>().unwrap(), x, "{t:?}");
        }
    }

    #[test]
    fn every_block_type_candle_quantises_comes_back() {
        let x: Vec<f32> = (0..512)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0)
            .collect();
        let x = Tensor::from_vec(x, (2, 256), &Device::Cpu).unwrap();
        for (number, t, name) in GGML {
            if matches!(t, GgmlDType::Q8_1 | GgmlDType::Q8K) {
                continue; // only made on the fly for products, never stored
            }
            let q = QTensor::quantize(&x, *t).unwrap();
            let want = q.dequantize(&Device::Cpu).unwrap();
            let stored = StoredType::from_ggml(*number).unwrap();
            assert_eq!(stored.name(), *name);
            let got = stored
                .widen(q.data().unwrap().into_owned(), &[2, 256])
                .unwrap();
            let worst = (got - want).unwrap().abs().unwrap().max_all().unwrap();
            assert_eq!(worst.to_scalar::<f32>().unwrap(), 0.0, "{name}");
        }
    }

    #[test]
    fn the_first_non_finite_value_is_named() {
        assert!(first_non_finite(&[0.0, -1.0]).is_none());
        let (count, first, value) = first_non_finite(&[0.0, f32::NAN, f32::INFINITY]).unwrap();
        assert_eq!((count, first), (2, 1));
        assert!(value.is_nan());
    }
}
