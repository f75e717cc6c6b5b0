//! A seam: one place of one host where a structure applies, with where its weights are stored.

use indexmap::IndexMap;
use serde::{Serialize, Serializer};
use structures_catalog::spec::ConstFill;
use structures_graph::{Layout, ParamRef};

use crate::refusal::Refusal;

/// What found a seam.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The structure's `slots` in a module tree.
    Slots,
    /// A family's binding.
    Binding,
    /// The structure's anchor operation in a graph.
    Graph,
}

/// Where a stored weight of a slot is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WeightAddress {
    /// Module path.
    pub path: String,
    /// Parameter name.
    pub name: String,
    /// Stored layout.
    #[serde(serialize_with = "layout_word")]
    pub layout: Layout,
    /// Row range of the stored tensor; `None` is all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<(usize, usize)>,
    /// Dims it is read with after a flatten.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reshape: Option<Vec<usize>>,
    /// Found by a name beside the module, not inside it: a graph may say otherwise.
    #[serde(skip)]
    pub hint: bool,
}

impl WeightAddress {
    /// The reference a host graph uses for it.
    pub fn param(&self) -> ParamRef {
        ParamRef {
            path: self.path.clone(),
            name: self.name.clone(),
            rows: self.rows,
        }
    }
}

/// What a slot is bound to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum SlotWeight {
    /// A stored parameter.
    Stored(WeightAddress),
    /// A constant.
    Const {
        /// Its value.
        #[serde(rename = "const", serialize_with = "fill_word")]
        fill: ConstFill,
    },
}

impl SlotWeight {
    /// The stored parameter, when it is one.
    pub fn stored(&self) -> Option<&WeightAddress> {
        match self {
            SlotWeight::Stored(a) => Some(a),
            SlotWeight::Const { .. } => None,
        }
    }
}

/// Something taken for granted because nothing said it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assumption {
    /// Axis or slot it is about.
    pub about: String,
    /// One sentence.
    pub text: String,
}

impl Serialize for Assumption {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&self.text)
    }
}

/// One place where a structure applies.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Seam {
    /// Structure.
    pub structure: String,
    /// Its version.
    pub version: u32,
    /// Module path.
    pub path: String,
    /// Path of the module above, as the structure names it.
    pub parent: String,
    /// Key in receipts: the path, and what tells it apart from a seam of the same structure on the same path.
    pub key: String,
    /// Symbol -> size.
    pub dims: IndexMap<String, u64>,
    /// Axis -> value.
    pub variant: IndexMap<String, String>,
    /// The path with its numbers replaced.
    pub family: String,
    /// Layer index, -1 if none.
    pub layer: i64,
    /// What found it.
    pub source: Source,
    /// Whether a graph confirmed it.
    pub located: bool,
    /// Names of the spans that hold, widest first; empty before it is located.
    pub spans: Vec<String>,
    /// What was taken for granted.
    pub assumptions: Vec<Assumption>,
    /// Role -> module path.
    pub roles: IndexMap<String, String>,
    /// Slot -> where it is stored; an absent optional slot is not listed.
    pub weights: IndexMap<String, SlotWeight>,
    /// Axes whose value is a word to report, not a fact read somewhere: a graph decides them freely.
    #[serde(skip)]
    pub open_axes: Vec<String>,
}

impl Seam {
    /// Whether the value of an axis is a fact of the tree or the binding.
    pub fn knows_axis(&self, axis: &str) -> bool {
        self.variant.contains_key(axis) && !self.open_axes.iter().any(|a| a == axis)
    }
}

/// What a walk over a module tree found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Discovery {
    /// Seams in module order.
    pub seams: Vec<Seam>,
    /// Candidates that were passed over, in module order.
    pub refused: Vec<Refusal>,
}

/// `in_out` or `out_in`.
pub(crate) fn layout_name(layout: Layout) -> &'static str {
    match layout {
        Layout::InOut => "in_out",
        Layout::OutIn => "out_in",
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // the signature serde asks for
fn layout_word<S: Serializer>(layout: &Layout, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(layout_name(*layout))
}

#[allow(clippy::trivially_copy_pass_by_ref)] // the signature serde asks for
fn fill_word<S: Serializer>(fill: &ConstFill, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(match fill {
        ConstFill::Zeros => "zeros",
        ConstFill::Ones => "ones",
    })
}
