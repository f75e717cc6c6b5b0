//! Qwen3-VL: a vision encoder over patches that are flattened already (packed q, k, v; rotation by row and column; a
//! merger of neighbours; features of inner layers for the first layers of the decoder), and a Qwen3 decoder whose
//! positions are three. Text alone has three equal ones, so the ordinary decoder graph serves it.

use std::sync::Arc;

use serde_json::Map;
use structures_graph::tree::{ArgKind, Module, ModuleKind, Scalar};
use structures_graph::{AttrValue, Dim, Graph, GraphBuilder, ModuleTree, OpKind, ValueId};

use super::{Blueprint, Family, Pictures};
use crate::checkpoint::{Checkpoint, Metadata};
use crate::config::{activation, DecoderConfig, Dialect, Fields, QkNorm, Rule};
use crate::decoder::graph::{Maker, POSITIONS, TOKENS};
use crate::decoder::weave::{dims, symbol, Weave};
use crate::decoder::{self, tree};
use crate::multimodal::{Sight, KEPT, PATCHES, SHARES, TAPS, VISUAL};
use crate::params::{ParamMap, ParamSpec, RowOrder};
use crate::ModelError;

const DIALECT: Dialect = Dialect {
    root: "model.language_model",
    qkv_bias: Rule::Field("attention_bias"),
    o_bias: Rule::Field("attention_bias"),
    qk_norm: QkNorm::Head,
    theta: 500_000.0,
    ..Dialect::plain("qwen3_vl", "Qwen3VLText")
};
const ROOT: &str = "model.visual";
const EPS: f64 = 1e-6;
const FIX: &str = "correct the file or get it again";

/// The family.
pub(super) const FAMILY: &dyn Family = &Vl;

struct Vl;

impl Family for Vl {
    fn name(&self) -> &'static str {
        DIALECT.model_type
    }

    fn model_types(&self) -> Vec<&'static str> {
        vec![DIALECT.model_type]
    }

    fn gguf_architectures(&self) -> Vec<&'static str> {
        Vec::new()
    }

    fn build(&self, checkpoint: &Checkpoint, _kind: &str) -> Result<Blueprint, ModelError> {
        let empty = Map::new();
        let whole = match checkpoint.metadata() {
            Metadata::Config(map) => map,
            Metadata::Gguf(_) => &empty,
        };
        let path = checkpoint.metadata_path();
        let fields = Fields {
            path: &path,
            prefix: String::new(),
            map: whole,
        };
        let text = fields.object("text_config")?;
        let text = fields.required("text_config", "an object", text)?;
        let mut map = text.map.clone();
        for shared in ["tie_word_embeddings", "bos_token_id", "eos_token_id"] {
            if let Some(value) = fields.get(shared) {
                map.entry(shared).or_insert(value.clone());
            }
        }
        let mut config = DecoderConfig::read_object(checkpoint, &map, &DIALECT)?;
        let vision = Vision::read(&fields, &config)?;
        let mut specs = decoder::specs(&config, false, false);
        specs.extend(vision.specs());
        let params = decoder::params(checkpoint, &mut config, specs)?;
        vision.no_block_is_left_over(checkpoint)?;
        let sections = sections(&text, &config)?;
        let tree = vision.tree(&config, &params);
        let graph = decoder::graph::graph(&config);
        let prefill = vision.prefill(&config, &sections);
        let encoder = vision.encoder();
        for graph in [&graph, &prefill, &encoder] {
            structures_graph::check(graph)?;
        }
        Ok(Blueprint {
            config,
            tree,
            graph: Arc::new(graph),
            params: Arc::new(params),
            pictures: Some(Pictures {
                sight: vision.sight,
                encoder: Arc::new(encoder),
                prefill: Arc::new(prefill),
            }),
        })
    }
}

/// Which of the three positions turns each frequency: rows and columns take every third one as far as their sections
/// reach, the rest are the frames'.
fn sections(text: &Fields<'_>, c: &DecoderConfig) -> Result<Vec<usize>, ModelError> {
    let mut sections = vec![24, 20, 20];
    for block in ["rope_scaling", "rope_parameters"] {
        if let Some(block) = text.object(block)? {
            let given = block.ids("mrope_section")?;
            if !given.is_empty() {
                sections = given.iter().map(|n| *n as usize).collect();
            }
        }
    }
    let half = c.rotary / 2;
    let fits = sections.len() == 3 && sections[1..].iter().all(|n| *n <= half.div_ceil(3));
    if !fits {
        return Err(ModelError::malformed(
            text.path,
            format!("{}mrope_section", text.prefix),
            format!("three sizes that fit {half} frequencies"),
            format!("{sections:?}"),
            FIX,
        ));
    }
    let of = |i: usize| match i % 3 {
        axis if axis > 0 && i < 3 * sections[axis] => axis,
        _ => 0,
    };
    Ok((0..half).map(of).collect())
}

struct Vision {
    sight: Sight,
    layers: usize,
    width: usize,
    inner: usize,
    heads: usize,
    kernel: [usize; 4],
    theta: f64,
    act: &'static str,
    /// Width of the decoder.
    out: usize,
    /// Layers whose output the decoder gets, in order, with the merger that makes it.
    deep: Vec<(usize, usize)>,
}

impl Vision {
    fn read(whole: &Fields<'_>, c: &DecoderConfig) -> Result<Self, ModelError> {
        let fields = whole.object("vision_config")?;
        let fields = whole.required("vision_config", "an object", fields)?;
        let size =
            |name: &str, absent: usize| Ok::<_, ModelError>(fields.size(name)?.unwrap_or(absent));
        let bad = |name: &str, expected: String, found: String| {
            let item = format!("{}{name}", fields.prefix);
            Err(ModelError::malformed(
                fields.path,
                item,
                expected,
                found,
                FIX,
            ))
        };
        let layers = size("depth", 27)?;
        if layers > 10_000 {
            return bad("depth", "at most 10000".into(), layers.to_string());
        }
        let width = size("hidden_size", 1152)?;
        let heads = size("num_heads", 16)?;
        if !width.is_multiple_of(heads) || !(width / heads).is_multiple_of(4) {
            let expected = format!("heads of a multiple of 4 channels in {width}");
            return bad("num_heads", expected, heads.to_string());
        }
        let table = size("num_position_embeddings", 2304)?;
        let grid = table.isqrt();
        if grid * grid != table {
            let expected = "a square number".to_string();
            return bad("num_position_embeddings", expected, table.to_string());
        }
        let out = size("out_hidden_size", c.hidden_size)?;
        if out != c.hidden_size {
            let expected = format!("the decoder's width {}", c.hidden_size);
            return bad("out_hidden_size", expected, out.to_string());
        }
        let (patch, frames) = (size("patch_size", 16)?, size("temporal_patch_size", 2)?);
        let channels = size("in_channels", 3)?;
        let indexes = match fields.get("deepstack_visual_indexes") {
            Some(_) => fields.ids("deepstack_visual_indexes")?,
            None => vec![8, 16, 24],
        };
        let mut deep: Vec<(usize, usize)> = indexes
            .iter()
            .enumerate()
            .map(|(merger, layer)| (*layer as usize, merger))
            .collect();
        deep.sort_unstable();
        let distinct = deep.windows(2).all(|w| w[0].0 != w[1].0);
        if !distinct || deep.iter().any(|(l, _)| *l >= layers) || deep.len() > c.layers {
            let expected = format!("different layers below {layers}, at most {}", c.layers);
            return bad("deepstack_visual_indexes", expected, format!("{indexes:?}"));
        }
        let act = match fields.text("hidden_act")? {
            Some(name) => activation(fields.path, "vision_config.hidden_act", name)?,
            None => "gelu_tanh",
        };
        let theta = match fields.object("rope_parameters")? {
            Some(block) => block.positive("rope_theta")?,
            None => None,
        };
        let mut placeholders = whole.ids("image_token_id")?;
        placeholders.extend(whole.ids("video_token_id")?);
        Ok(Vision {
            sight: Sight {
                patch: channels * frames * patch * patch,
                merge: size("spatial_merge_size", 2)?,
                grid,
                placeholders,
                deep: deep.len(),
            },
            layers,
            width,
            inner: size("intermediate_size", 4304)?,
            heads,
            kernel: [channels, frames, patch, patch],
            theta: theta.unwrap_or(10000.0),
            act,
            out,
            deep,
        })
    }

    fn block(&self, i: usize) -> String {
        format!("{ROOT}.blocks.{i}")
    }

    /// Width of what a merger joins.
    fn joined(&self) -> usize {
        self.width * self.sight.merge * self.sight.merge
    }

    /// The linear modules of a block, path below it.
    fn linears(&self) -> [(&'static str, &'static str, usize, usize); 4] {
        let (d, f) = (self.width, self.inner);
        [
            ("attn", "qkv", 3 * d, d),
            ("attn", "proj", d, d),
            ("mlp", "linear_fc1", f, d),
            ("mlp", "linear_fc2", d, f),
        ]
    }

    /// Path and width of the norm of every merger.
    fn mergers(&self) -> Vec<(String, usize)> {
        let mut mergers = vec![(format!("{ROOT}.merger"), self.width)];
        let list = (0..self.deep.len()).map(|i| format!("{ROOT}.deepstack_merger_list.{i}"));
        mergers.extend(list.map(|at| (at, self.joined())));
        mergers
    }

    fn specs(&self) -> Vec<ParamSpec> {
        let mut specs = Vec::new();
        let mut add = |path: &str, name: &'static str, dims: &[usize]| {
            specs.push(ParamSpec {
                path: path.into(),
                name,
                dims: dims.to_vec(),
                tensors: vec![format!("{path}.{name}")],
                rows: RowOrder::Published,
            });
        };
        let d = self.width;
        let [c, t, p, q] = self.kernel;
        let proj = format!("{ROOT}.patch_embed.proj");
        add(&proj, "weight", &[d, c, t, p, q]);
        add(&proj, "bias", &[d]);
        let grid = self.sight.grid;
        add(&format!("{ROOT}.pos_embed"), "weight", &[grid * grid, d]);
        let mut both = |path: String, dims: &[usize], out: usize| {
            add(&path, "weight", dims);
            add(&path, "bias", &[out]);
        };
        for i in 0..self.layers {
            let at = self.block(i);
            both(format!("{at}.norm1"), &[d], d);
            both(format!("{at}.norm2"), &[d], d);
            for (parent, name, out, input) in self.linears() {
                both(format!("{at}.{parent}.{name}"), &[out, input], out);
            }
        }
        let joined = self.joined();
        for (at, norm) in self.mergers() {
            both(format!("{at}.norm"), &[norm], norm);
            both(format!("{at}.linear_fc1"), &[joined, joined], joined);
            both(format!("{at}.linear_fc2"), &[self.out, joined], self.out);
        }
        specs
    }

    fn no_block_is_left_over(&self, checkpoint: &Checkpoint) -> Result<(), ModelError> {
        let prefix = format!("{ROOT}.blocks.");
        let index = |name: &str| -> Option<usize> {
            let (i, _) = name.strip_prefix(&prefix)?.split_once('.')?;
            i.parse().ok()
        };
        let beyond = |name: &str| index(name).is_some_and(|i| i >= self.layers);
        match checkpoint.tensor_infos().find(|t| beyond(&t.name)) {
            None => Ok(()),
            Some(t) => Err(ModelError::tensor(
                checkpoint.path(),
                &t.name,
                format!("only blocks below {}, as the config says", self.layers),
                format!("shape {:?}", t.dims),
                "config and checkpoint do not belong together: get both again",
            )),
        }
    }

    fn tree(&self, c: &DecoderConfig, params: &ParamMap) -> ModuleTree {
        let of = |class| tree::Maker {
            c,
            class,
            eps_name: DIALECT.eps_name,
            params,
        };
        let (top, sees, reads) = (of("Qwen3VL"), of("Qwen3VLVision"), of(DIALECT.class));
        let ids = ["input_ids", "position_ids"];
        let mut modules = vec![
            top.other("", "ForConditionalGeneration", &ids),
            top.other("model", "Model", &ids),
        ];
        modules.extend(self.modules(&sees));
        modules.push(reads.other(c.root, "Model", &ids));
        modules.extend(reads.decoder());
        modules.push(reads.head());
        ModuleTree::new(&c.model_type, modules)
    }

    fn modules(&self, t: &tree::Maker<'_>) -> Vec<Module> {
        let d = self.width;
        let list = |sizes: &[usize]| Scalar::List(sizes.iter().map(|n| tree::int(*n)).collect());
        let [channels, frames, patch, _] = self.kernel;
        let kernel = [frames, patch, patch];
        let input = || Some(vec![("input".to_string(), ArgKind::Arg)]);
        let norm = |path: String, width: usize| {
            let mut m = t.plain(&path, "LayerNorm");
            m.attrs.insert("normalized_shape".into(), list(&[width]));
            m.attrs.insert("eps".into(), Scalar::Float(EPS));
            m.forward = input();
            let params = [("weight", true), ("bias", true)];
            t.with_params(m, ModuleKind::LayerNorm, &params)
        };

        let mut embed = t.other(
            &format!("{ROOT}.patch_embed"),
            "PatchEmbed",
            &["hidden_states"],
        );
        for (name, n) in [
            ("patch_size", patch),
            ("temporal_patch_size", frames),
            ("in_channels", channels),
            ("embed_dim", d),
        ] {
            embed.attrs.insert(name.into(), tree::int(n));
        }
        let mut proj = t.plain(&format!("{ROOT}.patch_embed.proj"), "Conv3d");
        proj.forward = input();
        for (name, n) in [
            ("in_channels", channels),
            ("out_channels", d),
            ("groups", 1),
        ] {
            proj.attrs.insert(name.into(), tree::int(n));
        }
        for (name, sizes) in [
            ("kernel_size", kernel),
            ("stride", kernel),
            ("padding", [0; 3]),
            ("dilation", [1; 3]),
        ] {
            proj.attrs.insert(name.into(), list(&sizes));
        }
        let params = [("weight", true), ("bias", true)];
        let proj = t.with_params(proj, ModuleKind::Conv3d, &params);
        let grid = self.sight.grid;
        let mut modules = vec![
            t.other(ROOT, "Model", &["hidden_states", "grid_thw"]),
            embed,
            proj,
            t.embedding_of(&format!("{ROOT}.pos_embed"), "Embedding", grid * grid),
            t.other(
                &format!("{ROOT}.rotary_pos_emb"),
                "RotaryEmbedding",
                &["x", "position_ids"],
            ),
            t.plain(&format!("{ROOT}.blocks"), "ModuleList"),
        ];
        for i in 0..self.layers {
            let at = self.block(i);
            let arguments = ["hidden_states", "cu_seqlens", "position_embeddings"];
            modules.push(t.other(&at, "Block", &arguments));
            modules.push(norm(format!("{at}.norm1"), d));
            modules.push(norm(format!("{at}.norm2"), d));
            for (parent, name, out, input) in self.linears() {
                let parent_path = format!("{at}.{parent}");
                if name == "qkv" {
                    let mut m = t.other(&parent_path, "Attention", &arguments);
                    m.attrs.insert("num_heads".into(), tree::int(self.heads));
                    m.attrs.insert("head_dim".into(), tree::int(d / self.heads));
                    m.attrs.insert("is_causal".into(), Scalar::Flag(false));
                    modules.push(m);
                }
                if name == "linear_fc1" {
                    let mut m = t.other(&parent_path, "MLP", &["hidden_state"]);
                    m.attrs.insert("hidden_size".into(), tree::int(d));
                    m.attrs
                        .insert("intermediate_size".into(), tree::int(self.inner));
                    m.attrs
                        .insert("act_fn".into(), Scalar::Word(self.act.into()));
                    modules.push(m);
                }
                modules.push(t.linear(&parent_path, &(name, out, input, true)));
            }
            modules.push(t.activation(&format!("{at}.mlp.act_fn")));
        }
        let joined = self.joined();
        for (i, (at, width)) in self.mergers().into_iter().enumerate() {
            if i == 1 {
                let path = format!("{ROOT}.deepstack_merger_list");
                modules.push(t.plain(&path, "ModuleList"));
            }
            let mut m = t.other(&at, "PatchMerger", &["x"]);
            m.attrs.insert("hidden_size".into(), tree::int(joined));
            m.attrs
                .insert("act_fn".into(), Scalar::Word("gelu_exact".into()));
            modules.push(m);
            modules.push(norm(format!("{at}.norm"), width));
            modules.push(t.linear(&at, &("linear_fc1", joined, joined, true)));
            modules.push(t.activation(&format!("{at}.act_fn")));
            modules.push(t.linear(&at, &("linear_fc2", self.out, joined, true)));
        }
        modules
    }

    /// Tokens and what was seen, into an empty state.
    fn prefill(&self, c: &DecoderConfig, sections: &[usize]) -> Graph {
        let mut m = Maker::new("multimodal", c);
        let stream = || dims(&["B", "T"], &[c.hidden_size]);
        let tokens = m.w.b.input(TOKENS, dims(&["B", "T"], &[]));
        let positions = m.w.b.input(POSITIONS, vec![Dim::Size(3), symbol("T")]);
        let kept = m.w.b.input(KEPT, dims(&["B", "T"], &[1]));
        let visual = m.w.b.input(VISUAL, stream());
        let deep: Vec<ValueId> = (0..self.deep.len())
            .map(|i| m.w.b.input(&format!("{VISUAL}_{i}"), stream()))
            .collect();
        let x = m.embedding(tokens);
        let x = m.w.mul(c.root, "text_embeds", x, kept);
        let mut x = m.w.add(c.root, "inputs_embeds", x, visual);
        let at = format!("{}.rotary_emb", c.root);
        let tables =
            m.w.rope_tables(&at, positions, &c.rope, c.rotary, Some(sections));
        for i in 0..c.layers {
            x = m.layer(i, x, tables);
            if let Some(features) = deep.get(i) {
                x = m.w.add(&c.layer(i), "deepstacked", x, *features);
            }
        }
        m.head(x);
        m.w.b.finish()
    }

    /// One frame: `[1,N,K]` patches to `[1,N/merge^2,width of the decoder]` features.
    fn encoder(&self) -> Graph {
        let mut w = Weave {
            b: GraphBuilder::new("vision_encode"),
            eps: EPS,
            offset: false,
        };
        let d = self.width;
        let head = d / self.heads;
        let patches = w.b.input(PATCHES, dims(&["B", "T"], &[self.sight.patch]));
        let positions = w.b.input(POSITIONS, vec![Dim::Size(2), symbol("T")]);
        let taps = w.b.input(TAPS, vec![Dim::Size(4), symbol("T")]);
        let shares = vec![Dim::Size(4), symbol("T"), Dim::Size(1)];
        let shares = w.b.input(SHARES, shares);

        let proj = format!("{ROOT}.patch_embed.proj");
        let sizes = [self.sight.patch, d];
        let x = w.linear(&proj, "out", patches, None, sizes, true);
        let table = format!("{ROOT}.pos_embed");
        let grid = self.sight.grid;
        let rows = w.param(&table, "weight", None, &[grid * grid, d]);
        let near = vec![Dim::Size(4), symbol("T"), Dim::Size(d)];
        let near = w.op(OpKind::Embedding, &table, "out", &[taps, rows], &[], near);
        let near = w.mul(ROOT, "near_shares", near, shares);
        let one = || vec![Dim::Size(1), symbol("T"), Dim::Size(d)];
        let parts = w.b.ops(
            OpKind::Chunk,
            ROOT,
            &[Some(near)],
            &[("n", AttrValue::Int(4)), ("axis", AttrValue::Int(0))],
            ["a", "b", "c", "d"].map(|l| (l, one())).to_vec(),
        );
        let sum = w.add(ROOT, "near_ab", parts[0], parts[1]);
        let sum = w.add(ROOT, "near_abc", sum, parts[2]);
        let sum = w.add(ROOT, "pos_embeds", sum, parts[3]);
        let mut x = w.add(ROOT, "embedded", x, sum);

        // Rows turn the first half of the frequencies, columns the second.
        let each = (0..head / 4).map(|i| {
            let f = self.theta.powf(-(4.0 * i as f64) / head as f64);
            f64::from(f as f32)
        });
        let each: Vec<f64> = each.collect();
        let axes: Vec<usize> = (0..head / 2).map(|i| i / (head / 4)).collect();
        let at = format!("{ROOT}.rotary_pos_emb");
        let frequencies = [each.clone(), each].concat();
        let tables = w.rope_tables_by(&at, positions, frequencies, Some(&axes));
        let mut outputs = Vec::new();
        for i in 0..self.layers {
            let at = self.block(i);
            let normed = w.layer_norm(&format!("{at}.norm1"), x, d);
            let y = self.attention(&mut w, &format!("{at}.attn"), normed, tables);
            x = w.add(&at, "attended", x, y);
            let normed = w.layer_norm(&format!("{at}.norm2"), x, d);
            let y = self.feed(
                &mut w,
                &format!("{at}.mlp"),
                normed,
                self.act,
                [d, self.inner, d],
            );
            x = w.add(&at, "out", x, y);
            if let Some((_, merger)) = self.deep.iter().find(|(layer, _)| *layer == i) {
                let at = format!("{ROOT}.deepstack_merger_list.{merger}");
                outputs.push(self.merged(&mut w, &at, x, true));
            }
        }
        let last = self.merged(&mut w, &format!("{ROOT}.merger"), x, false);
        w.b.output(VISUAL, last);
        for (i, value) in outputs.into_iter().enumerate() {
            w.b.output(&format!("{VISUAL}_{i}"), value);
        }
        w.b.finish()
    }

    fn attention(&self, w: &mut Weave, at: &str, x: ValueId, tables: [ValueId; 2]) -> ValueId {
        let (d, h) = (self.width, self.heads);
        let module = format!("{at}.qkv");
        let packed = w.linear(&module, "out", x, None, [d, 3 * d], true);
        let parts = w.split(at, packed, &[("q", d), ("k", d), ("v", d)]);
        let mut heads = Vec::new();
        for (part, label) in parts.into_iter().zip(["q", "k", "v"]) {
            let split = dims(&["B", "T"], &[h, d / h]);
            let mut y = w.reshape(at, &format!("{label}_heads"), part, split);
            if label != "v" {
                y = w.rope(at, &format!("{label}_rope"), y, tables, d / h);
            }
            heads.push(w.heads_first(at, &format!("{label}_first"), y));
        }
        let out = dims(&["B", "T"], &[h, d / h]);
        let out = w.op(OpKind::Attention, at, "attention", &heads, &[], out);
        let out = w.reshape(at, "merged", out, dims(&["B", "T"], &[d]));
        let module = format!("{at}.proj");
        w.linear(&module, "out", out, None, [d, d], true)
    }

    fn feed(
        &self,
        w: &mut Weave,
        at: &str,
        x: ValueId,
        act: &str,
        [input, inner, out]: [usize; 3],
    ) -> ValueId {
        let fc1 = format!("{at}.linear_fc1");
        let y = w.linear(&fc1, "out", x, None, [input, inner], true);
        let y = w.act(&format!("{at}.act_fn"), "out", y, act);
        let fc2 = format!("{at}.linear_fc2");
        w.linear(&fc2, "out", y, None, [inner, out], true)
    }

    /// Neighbours joined and brought to the decoder's width; normed before or after they are joined.
    fn merged(&self, w: &mut Weave, at: &str, x: ValueId, after: bool) -> ValueId {
        let joined = self.joined();
        let norm = format!("{at}.norm");
        let shape = dims(&["B", "M"], &[joined]);
        let y = match after {
            true => {
                let y = w.reshape(at, "joined", x, shape);
                w.layer_norm(&norm, y, joined)
            }
            false => {
                let y = w.layer_norm(&norm, x, self.width);
                w.reshape(at, "joined", y, shape)
            }
        };
        self.feed(w, at, y, "gelu_exact", [joined, joined, self.out])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_take_every_third_frequency() {
        let map = serde_json::json!({"rope_parameters": {"mrope_section": [4, 2, 2]}});
        let fields = Fields {
            path: std::path::Path::new("config.json"),
            prefix: "text_config.".into(),
            map: map.as_object().unwrap(),
        };
        let mut c = DecoderConfig::for_tests();
        c.rotary = 16;
        assert_eq!(sections(&fields, &c).unwrap(), [0, 1, 2, 0, 1, 2, 0, 0]);
        c.rotary = 8;
        assert_eq!(sections(&fields, &c).unwrap(), [0, 1, 2, 0]);
        c.rotary = 4;
        let message = sections(&fields, &c).unwrap_err().to_string();
        assert!(message.contains("text_config.mrope_section"), "{message}");
    }
}
