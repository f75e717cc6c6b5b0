"""Makes the cases of tests/fixtures/families: small models with random weights, run by the published implementation.

    python scripts/family_cases.py OUT [NAME ...]

Needs torch, transformers (5.24) and safetensors. A case has the model as the library saves it, inputs and outputs
(`io.safetensors`), greedy continuations and the largest input of every linear module (`case.json`), and the config and
tensor shapes of a wider sibling (`wide.json`), whose weights the test draws.
"""

import json
import os
import sys

import numpy as np
import torch
import transformers
from transformers import *
from safetensors.torch import save_file

torch.set_num_threads(1)


def base(**kw):
    d = dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    d.update(kw)
    return d


# Makes projections that the catalog's floor of 262144 elements admits.
WIDE = dict(
    vocab_size=640,
    hidden_size=512,
    intermediate_size=640,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=512,
)
CASES = {
    "mistral": (
        MistralConfig,
        MistralForCausalLM,
        dict(sliding_window=8, head_dim=12, tie_word_embeddings=False, rms_norm_eps=1e-5),
        dict(head_dim=64, sliding_window=24),
    ),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        dict(
            head_dim=12,
            sliding_window=8,
            query_pre_attn_scalar=10,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=6.0,
            num_hidden_layers=4,
            vocab_size=64,
            intermediate_size=36,
        ),
        dict(head_dim=64, query_pre_attn_scalar=64, sliding_window=24),
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        dict(
            head_dim=12,
            sliding_window=6,
            query_pre_attn_scalar=10,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            num_hidden_layers=4,
            vocab_size=64,
            intermediate_size=36,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        ),
        dict(
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "phi3": (
        Phi3Config,
        Phi3ForCausalLM,
        dict(
            sliding_window=9,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            original_max_position_embeddings=256,
        ),
        dict(sliding_window=24, num_key_value_heads=4, original_max_position_embeddings=512),
    ),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        dict(
            embedding_multiplier=6.0,
            residual_multiplier=0.22,
            attention_multiplier=0.15,
            logits_scaling=3.0,
            tie_word_embeddings=True,
            num_key_value_heads=1,
        ),
        dict(num_key_value_heads=8, attention_multiplier=0.125),
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, dict(tie_word_embeddings=False, rms_norm_eps=1e-6), dict()),
    "olmo3": (
        Olmo3Config,
        Olmo3ForCausalLM,
        dict(
            tie_word_embeddings=False,
            sliding_window=7,
            vocab_size=64,
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 800.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 800.0},
            },
            num_hidden_layers=4,
        ),
        dict(sliding_window=24, layer_types=["sliding_attention", "full_attention"]),
    ),
}


# The same families with other settings, smaller and without a wider sibling.
SMALL = dict(vocab_size=64, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
VARIANTS = {
    "llama_yarn": (
        LlamaConfig,
        LlamaForCausalLM,
        dict(
            attention_bias=True,
            mlp_bias=True,
            head_dim=16,
            hidden_act="gelu",
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 6.0,
                "beta_slow": 0.5,
                "mscale": 0.7,
                "mscale_all_dim": 0.3,
            },
        ),
    ),
    "llama_dynamic": (
        LlamaConfig,
        LlamaForCausalLM,
        dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 3.0}, tie_word_embeddings=True),
    ),
    "mistral_yarn": (
        MistralConfig,
        MistralForCausalLM,
        dict(
            sliding_window=None,
            head_dim=8,
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.3,
            },
        ),
    ),
    "qwen2_windows": (
        Qwen2Config,
        Qwen2ForCausalLM,
        dict(use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=False),
    ),
    "qwen3_yarn": (
        Qwen3Config,
        Qwen3ForCausalLM,
        dict(
            head_dim=20,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 300.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        ),
    ),
    "gemma2_uncapped": (
        Gemma2Config,
        Gemma2ForCausalLM,
        dict(
            head_dim=8,
            sliding_window=5,
            query_pre_attn_scalar=12,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            hidden_activation="gelu",
            rope_parameters={"rope_type": "linear", "rope_theta": 8000.0, "factor": 2.0},
        ),
    ),
    "gemma3_yarn": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        dict(
            head_dim=8,
            sliding_window=5,
            query_pre_attn_scalar=6,
            attention_bias=True,
            final_logit_softcapping=7.0,
            layer_types=["full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 900.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
            },
        ),
    ),
    "phi3_longrope": (
        Phi3Config,
        Phi3ForCausalLM,
        dict(
            num_key_value_heads=4,
            hidden_size=32,
            tie_word_embeddings=True,
            original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 9000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.5],
                "long_factor": [2.0, 4.0, 8.0],
            },
        ),
    ),
    "granite_biases": (
        GraniteConfig,
        GraniteForCausalLM,
        dict(
            attention_bias=True,
            mlp_bias=True,
            embedding_multiplier=2.0,
            logits_scaling=0.5,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 4000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ),
    "olmo2_biases": (
        Olmo2Config,
        Olmo2ForCausalLM,
        dict(attention_bias=True, num_key_value_heads=4, tie_word_embeddings=True),
    ),
    "qwen3_next_stepped": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        dict(
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            num_hidden_layers=3,
            head_dim=8,
            attention_bias=True,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=4,
            linear_value_head_dim=12,
            linear_conv_kernel_dim=4,
            num_experts=3,
            num_experts_per_tok=1,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=12,
            decoder_sparse_step=2,
            norm_topk_prob=True,
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 600.0,
                "factor": 2.0,
                "original_max_position_embeddings": 128,
                "partial_rotary_factor": 1.0,
            },
        ),
    ),
}
CASES.update({name: (c, m, {**SMALL, **kw}, None) for name, (c, m, kw) in VARIANTS.items()})


# A text decoder inside a model that sees, which reads text alone here.
CASES["gemma3_inside"] = (
    lambda **kw: Gemma3Config(
        text_config=kw,
        vision_config=dict(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
        ),
        mm_tokens_per_image=4,
        image_token_index=61,
        boi_token_index=62,
        eoi_token_index=63,
    ),
    Gemma3ForConditionalGeneration,
    {**SMALL, **dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=6, num_hidden_layers=6)},
    None,
)


def randomise(model, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "norm" in n and p.dim() == 1:
                zero_centred = p.abs().max() == 0
                p.copy_(torch.randn(p.shape, generator=g) * 0.2 + (0.0 if zero_centred else 1.0))
            else:
                p.copy_(torch.randn(p.shape, generator=g) * 0.25)


def make_wide(d, C, M, w):
    """A wider sibling: its config and the shapes of its tensors, no values."""
    wc = C(**w)
    with torch.device("meta"):
        wm = M(wc)
    tied = bool(wc.tie_word_embeddings)
    shapes = {n: list(t.shape) for n, t in wm.state_dict().items() if not (tied and n == "lm_head.weight")}
    cj = json.loads(wc.to_json_string(use_diff=False))
    small = json.load(open(os.path.join(d, "config.json")))
    cj = {k: cj[k] for k in small if k in cj}
    json.dump(dict(config=cj, tensors=shapes), open(os.path.join(d, "wide.json"), "w"), separators=(",", ":"))


def make(name, out, seed):
    C, M, kw, wide = CASES[name]
    cfg = C(**base(**kw))
    torch.manual_seed(seed)
    cfg._attn_implementation = "eager"
    model = M(cfg).float().eval()
    randomise(model, seed)
    d = os.path.join(out, name)
    os.makedirs(d, exist_ok=True)
    model.save_pretrained(d)
    for f in os.listdir(d):
        if f not in ("config.json", "model.safetensors"):
            os.remove(os.path.join(d, f))
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    amax = {}

    def hook(n):
        def f(mod, inp):
            amax.setdefault(n, []).append(inp[0].abs().max().item())

        return f

    io = {}
    samples = []
    per = []
    rng = np.random.RandomState(seed)
    for i, T in enumerate([1, 7, 21]):
        ids = torch.tensor(rng.randint(3, cfg.get_text_config().vocab_size, size=(1, T)))
        amax.clear()
        hs = [
            m.register_forward_pre_hook(hook(n))
            for n, m in model.named_modules()
            if isinstance(m, torch.nn.Linear)
        ]
        with torch.no_grad():
            o = model(ids, output_hidden_states=True, use_cache=False)
        for h in hs:
            h.remove()
        per.append([max(amax[n]) if n in amax else None for n in names])
        io[f"s{i}.in.input_ids"] = ids
        io[f"s{i}.out.logits"] = o.logits.contiguous().clone()
        if T == 21:
            for j, h in enumerate(o.hidden_states):
                io[f"s{i}.hidden.{j}"] = h.contiguous().clone()
        greedy = []
        margins = []
        with torch.no_grad():
            cur = ids
            past = None
            full = ids
            for s in range(16):
                r = model(cur, past_key_values=past, use_cache=True)
                past = r.past_key_values
                l = r.logits[0, -1]
                top = l.topk(2).values
                t = int(l.argmax())
                greedy.append(t)
                margins.append((top[0] - top[1]).item())
                cur = torch.tensor([[t]])
                full = torch.cat([full, cur], 1)
            # without cache
            f = ids
            g2 = []
            for s in range(16):
                l = model(f, use_cache=False).logits[0, -1]
                t = int(l.argmax())
                g2.append(t)
                f = torch.cat([f, torch.tensor([[t]])], 1)
        assert greedy == g2, (name, i, greedy, g2)
        samples.append(dict(tokens=T, greedy=greedy, smallest_margin=min(margins)))
    save_file(io, os.path.join(d, "io.safetensors"))
    case = dict(
        name=name,
        versions=dict(torch=torch.__version__, transformers=transformers.__version__),
        seed=seed,
        model_class=M.__name__,
        samples=samples,
        input_amax=dict(points=names, per_sample=per),
    )
    json.dump(case, open(os.path.join(d, "case.json"), "w"), separators=(",", ":"))
    if wide is not None:
        make_wide(d, C, M, {**base(**kw), **WIDE, **wide})
    sz = {f: os.path.getsize(os.path.join(d, f)) for f in sorted(os.listdir(d))}
    print(name, sz, "margin", min(s["smallest_margin"] for s in samples))


CASES["qwen3_next"] = (
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    dict(
        hidden_size=32,
        vocab_size=52,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        mlp_only_layers=[1],
        norm_topk_prob=False,
        tie_word_embeddings=False,
        intermediate_size=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    dict(
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_key_value_heads=8,
        layer_types=["linear_attention", "full_attention"],
        moe_intermediate_size=64,
        shared_expert_intermediate_size=640,
        mlp_only_layers=[],
    ),
)


# Name -> text, vision and whole settings; for each sample its pictures and videos in order.
VL = {
    "qwen3_vl": (
        {},
        {},
        dict(tie_word_embeddings=True),
        [[], [(1, 4, 4)], [(1, 4, 6), (1, 2, 2)], [(2, 2, 4)]],
    ),
    "qwen3_vl_video": (
        dict(attention_bias=True, hidden_act="gelu", hidden_size=24, num_key_value_heads=1),
        dict(
            depth=3,
            deepstack_visual_indexes=[2, 0],
            out_hidden_size=24,
            num_position_embeddings=16,
            hidden_act="gelu",
            rope_parameters={"rope_type": "axial", "rope_theta": 300.0},
        ),
        dict(tie_word_embeddings=False),
        [[], ["video", (2, 2, 4)], ["video", (3, 2, 2), "image", (1, 4, 2), "video", (1, 2, 2)]],
    ),
}


def make_vl(name, out, seed):
    more_text, more_vision, whole, all_grids = VL[name]

    def cfg(text, vision):
        return Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=60,
            video_token_id=61,
            vision_start_token_id=62,
            vision_end_token_id=63,
            **whole,
        )

    t = base(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=12)
    t.update(
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 2, 2],
            "mrope_interleaved": True,
        }
    )
    t.update(more_text)
    v = dict(
        depth=2,
        hidden_size=16,
        num_heads=2,
        intermediate_size=20,
        patch_size=2,
        temporal_patch_size=2,
        in_channels=3,
        spatial_merge_size=2,
        out_hidden_size=32,
        num_position_embeddings=9,
        deepstack_visual_indexes=[0],
        hidden_act="gelu_pytorch_tanh",
    )
    v.update(more_vision)
    c = cfg(t, v)
    c._attn_implementation = "eager"
    c.text_config._attn_implementation = "eager"
    c.vision_config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(c).float().eval()
    randomise(model, seed)
    d = os.path.join(out, name)
    os.makedirs(d, exist_ok=True)
    model.save_pretrained(d)
    for f in os.listdir(d):
        if f not in ("config.json", "model.safetensors"):
            os.remove(os.path.join(d, f))
    lin = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    names = [n for n, _ in lin]
    rng = np.random.RandomState(seed)
    io = {}
    samples = []
    per = []
    for i, grids in enumerate(all_grids):
        ids = [int(x) for x in rng.randint(3, 60, size=3)]
        types = [0] * 3
        values = {"image": [], "video": []}
        where = {"image": [], "video": []}
        kind = "image"
        for grid in grids:
            if isinstance(grid, str):
                kind = grid
                continue
            gt, h, w = grid
            where[kind].append(grid)
            # The frames of a video stand apart, a time before each.
            runs = [gt] if kind == "image" else [1] * gt
            for frames in runs:
                n = frames * h * w // 4
                token, mark = (60, 1) if kind == "image" else (61, 2)
                ids += [62] + [token] * n + [63]
                types += [0] + [mark] * n + [0]
                if kind == "video":
                    ids.append(5)
                    types.append(0)
            values[kind].append(torch.tensor(rng.randn(gt * h * w, 24), dtype=torch.float32))
            tail = [int(x) for x in rng.randint(3, 60, size=4)]
            ids += tail
            types += [0] * 4
        ids = torch.tensor([ids])
        types = torch.tensor([types])
        kw = {}
        if grids:
            kw = dict(mm_token_type_ids=types)
        for kind, pixels, grid in [
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ]:
            if values[kind]:
                kw[pixels] = torch.cat(values[kind])
                kw[grid] = torch.tensor(where[kind])
        amax = {}
        hs = [
            m.register_forward_pre_hook(
                (lambda n: lambda mod, inp: amax.setdefault(n, []).append(inp[0].abs().max().item()))(n)
            )
            for n, m in lin
        ]
        model.model.rope_deltas = None
        with torch.no_grad():
            o = model(ids, output_hidden_states=True, use_cache=False, **kw)
        for h in hs:
            h.remove()
        per.append([max(amax[n]) if n in amax else None for n in names])
        io[f"s{i}.in.input_ids"] = ids
        io[f"s{i}.out.logits"] = o.logits.contiguous().clone()
        for key in kw:
            if key != "mm_token_type_ids":
                io[f"s{i}.in.{key}"] = kw[key]
        if i == 2:
            for j, h in enumerate(o.hidden_states):
                io[f"s{i}.hidden.{j}"] = h.contiguous().clone()
        greedy = []
        margins = []
        past = None
        cur = ids
        extra = kw
        model.model.rope_deltas = None
        with torch.no_grad():
            for s in range(16):
                r = model(cur, past_key_values=past, use_cache=True, **extra)
                past = r.past_key_values
                extra = {}
                l = r.logits[0, -1]
                top = l.topk(2).values
                tk = int(l.argmax())
                greedy.append(tk)
                margins.append((top[0] - top[1]).item())
                cur = torch.tensor([[tk]])
        samples.append(dict(tokens=ids.shape[1], greedy=greedy, smallest_margin=min(margins)))
        if any(t in (60, 61) for t in greedy):
            print("greedy holds placeholders", i, greedy)
    save_file(io, os.path.join(d, "io.safetensors"))
    json.dump(
        dict(
            name=name,
            versions=dict(torch=torch.__version__, transformers=transformers.__version__),
            seed=seed,
            model_class="Qwen3VLForConditionalGeneration",
            samples=samples,
            input_amax=dict(points=names, per_sample=per),
        ),
        open(os.path.join(d, "case.json"), "w"),
        separators=(",", ":"),
    )
    print(name, {f: os.path.getsize(os.path.join(d, f)) for f in sorted(os.listdir(d))})
    print("margin", min(s["smallest_margin"] for s in samples))
    if name != "qwen3_vl":
        return
    W = {**base(), **WIDE, **dict(head_dim=64)}
    W.update(rope_parameters=t["rope_parameters"])
    vw = dict(v, out_hidden_size=512)
    wc = cfg(W, vw)
    with torch.device("meta"):
        wm = Qwen3VLForConditionalGeneration(wc)
    shapes = {n: list(x.shape) for n, x in wm.state_dict().items() if n != "lm_head.weight"}
    small = json.load(open(os.path.join(d, "config.json")))
    cj = json.loads(wc.to_json_string(use_diff=False))

    def cut(a, b):
        return {
            k: (cut(a[k], b[k]) if isinstance(b[k], dict) and isinstance(a[k], dict) else a[k])
            for k in b
            if k in a
        }

    json.dump(
        dict(config=cut(cj, small), tensors=shapes),
        open(os.path.join(d, "wide.json"), "w"),
        separators=(",", ":"),
    )


out = sys.argv[1]
for n in sys.argv[2:] or [*CASES, *VL]:
    make_vl(n, out, 9100) if n in VL else make(n, out, 9000 + sum(map(ord, n)))
