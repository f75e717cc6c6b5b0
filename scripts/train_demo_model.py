#!/usr/bin/env python3
"""Train, or check, the demo checkpoint in demo/model: a small byte-level Llama.

The model is an ordinary `LlamaForCausalLM` in Hugging Face format (2 layers,
hidden size 512, 8 query heads over 2 key/value heads, byte vocabulary). The
text is the King James Bible as printed by the `bible` program of Debian's
package `bible-kjv` (public domain). Training runs in JAX on a CPU.

    apt-get install bible-kjv
    pip install numpy jax ml_dtypes safetensors
    python3 scripts/train_demo_model.py            # train, write demo/model
    python3 scripts/train_demo_model.py --check    # needs numpy only

Training saves a usable checkpoint every 100 steps; each file is written under
a temporary name and renamed, so a reader never sees half a file.

`--check` uses none of the training code but the reading of the text: it parses
model.safetensors by hand, widens bf16 to f32, runs its own numpy forward pass
over the whole held-out text, and prints the loss and a greedy sample.

Text: one verse per line without its reference, an empty line between
chapters, and token 256 (<|endoftext|>) after each book. Ids 0..255 are the
byte values; 257..263 are padding of the embedding table and are never used.
The first 95 % of the tokens train, the last 5 % are held out. Held-out loss:
the text is cut into consecutive windows, and every token but the first is
predicted once, from what precedes it in its window.

The random seed is fixed (SEED). Another processor or package version gives
slightly different sums, so a new run should come close to the figures below,
not reproduce the bytes.

The shipped run: default options, 3,932,086 training tokens, 206,952 held out,
3,942,912 parameters, 2,200 steps of 2,048 tokens (1.15 passes over the text).
    last training loss, mean of 25 steps   1.0474 nats/byte
    held out, windows of 256               1.2233 nats/byte, 1.7649 bits/byte
    held out, windows of 512               1.2264 nats/byte, 1.7694 bits/byte
`--check` printed the same held-out figures, to all four decimals. Wall time
1,603 s on two cores shared with compilers (0.73 s a step; 0.45 s in a trial while they were idle).
Python 3.11.7, numpy 2.4.6, jax and jaxlib 0.10.2, ml_dtypes 0.6.0,
safetensors 0.8.0, bible-kjv 4.38.
"""

import argparse
import json
import math
import os
import re
import struct
import subprocess
import time
from pathlib import Path

# The matrices of --check are small, and on a busy machine numpy's threads
# mostly wait for each other: one is several times faster. JAX has its own.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np  # noqa: E402

SEED = 1611
VERSES = 31102
BOOKS = 66
EOT = 256
HELD_OUT = 0.05
DEFAULT_DIR = Path(__file__).resolve().parent.parent / "demo" / "model"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": EOT,
    "eos_token_id": EOT,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 264,
}

# Training recipe. Most steps see windows of 256 tokens; the last LONG_STEPS
# see windows of 512 (half as many), so that all 512 positions are trained.
STEPS = 2200
LONG_STEPS = 200
TOKENS_PER_STEP = 2048
CONTEXT = 256
LONG_CONTEXT = 512
WARMUP = 100
PEAK_LR = 1e-3
FINAL_LR = 5e-5
BETAS = (0.9, 0.98)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
CLIP = 1.0
SAVE_EVERY = 100


# ---------------------------------------------------------------- text

def load_tokens(path):
    """Token ids of the whole text, from `path` or from the bible program."""
    if path:
        printed = Path(path).read_text("ascii")
    else:
        # Without a terminal, -f asks for one verse per line.
        printed = subprocess.run(
            ["bible", "-f", "gen1:1-rev22:21"], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, check=True).stdout.decode("ascii")
    tokens, verses, books = [], 0, 0
    book = chapter = None
    for line in printed.splitlines():
        match = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if not match:
            raise SystemExit(f"not a verse: {line!r}")
        if match[1] != book:
            books += 1
            if book is not None:
                tokens.append(EOT)
        elif match[2] != chapter:
            tokens.append(ord("\n"))
        book, chapter = match[1], match[2]
        tokens.extend(match[4].strip().encode("ascii") + b"\n")
        verses += 1
    tokens.append(EOT)
    if (verses, books) != (VERSES, BOOKS):
        raise SystemExit(f"{verses} verses in {books} books, "
                         f"expected {VERSES} in {BOOKS}")
    return np.array(tokens, np.int32)


def split(tokens):
    cut = int(len(tokens) * (1 - HELD_OUT))
    return tokens[:cut], tokens[cut:]


def windows(tokens, context):
    """Consecutive windows: (whole windows, context + 1), and the remainder."""
    count = (len(tokens) - 1) // context
    whole = np.stack([tokens[i * context:(i + 1) * context + 1]
                      for i in range(count)])
    return whole, tokens[count * context:]


# ---------------------------------------------------------------- files

def replace_file(path, data):
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def write_json(path, value):
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, text.encode("utf-8"))


def byte_alphabet():
    """GPT-2's character for each byte value, in byte order: printable bytes
    stand for themselves, the others follow from U+0100 on."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(b if b in kept else next(spare)) for b in range(256)]


def write_settings(directory):
    """Everything in the checkpoint but the weights."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False,
                  "trim_offsets": True, "use_regex": False}
    special = {"content": "<|endoftext|>", "single_word": False,
               "lstrip": False, "rstrip": False, "normalized": False,
               "special": True}
    write_json(directory / "config.json", CONFIG)
    write_json(directory / "generation_config.json", {
        "_from_model_config": True, "bos_token_id": EOT, "eos_token_id": EOT})
    write_json(directory / "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": EOT, **special}],
        "normalizer": None, "pre_tokenizer": byte_level,
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": False,
                  "vocab": {c: b for b, c in enumerate(byte_alphabet())},
                  "merges": []}})
    write_json(directory / "tokenizer_config.json", {
        "added_tokens_decoder": {str(EOT): special},
        "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast"})


# ---------------------------------------------------------------- training

def tensor_shapes():
    hidden, mlp = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    query = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    key = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    shapes = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (query, hidden),
            layer + "self_attn.k_proj.weight": (key, hidden),
            layer + "self_attn.v_proj.weight": (key, hidden),
            layer + "self_attn.o_proj.weight": (hidden, query),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "mlp.gate_proj.weight": (mlp, hidden),
            layer + "mlp.up_proj.weight": (mlp, hidden),
            layer + "mlp.down_proj.weight": (hidden, mlp)}
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (CONFIG["vocab_size"], hidden)
    return shapes


def train(directory, text, steps, long_steps):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import safetensors.numpy

    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    dim, layers = CONFIG["head_dim"], CONFIG["num_hidden_layers"]
    eps = CONFIG["rms_norm_eps"]

    def norm(x, weight):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight

    def rotate(x):
        """Rotate-half rotary embedding of (batch, time, heads, dim)."""
        frequency = CONFIG["rope_theta"] ** (-jnp.arange(0, dim, 2) / dim)
        angle = jnp.arange(x.shape[1])[:, None] * frequency
        cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attend(q, k, v):
        """Causal attention. Query head h reads key/value head h // group;
        a group's queries share one matrix product, which is faster here."""
        size, length, group = q.shape[0], q.shape[1], heads // kv_heads
        q = q.reshape(size, length, kv_heads, group, dim)
        q = q.transpose(0, 2, 3, 1, 4).reshape(size, kv_heads, group * length, dim)
        k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        causal = jnp.tril(jnp.ones((length, length), bool))
        score = (q @ k).reshape(size, kv_heads, group, length, length)
        score = jnp.where(causal, score / math.sqrt(dim), -1e30)
        weight = jax.nn.softmax(score, -1)
        mixed = weight.reshape(size, kv_heads, group * length, length) @ v
        mixed = mixed.reshape(size, kv_heads, group, length, dim)
        return mixed.transpose(0, 3, 1, 2, 4).reshape(size, length, heads * dim)

    def loss_of(params, batch):
        """Mean next-token loss, nats, over (batch, context + 1) ids."""
        ids, targets = batch[:, :-1], batch[:, 1:]
        size, length = ids.shape
        x = params["model.embed_tokens.weight"][ids]
        for i in range(layers):
            w = lambda name: params[f"model.layers.{i}.{name}.weight"]
            h = norm(x, w("input_layernorm"))
            q = rotate((h @ w("self_attn.q_proj").T).reshape(size, length, heads, dim))
            k = rotate((h @ w("self_attn.k_proj").T).reshape(size, length, kv_heads, dim))
            v = (h @ w("self_attn.v_proj").T).reshape(size, length, kv_heads, dim)
            x = x + attend(q, k, v) @ w("self_attn.o_proj").T
            h = norm(x, w("post_attention_layernorm"))
            gate = jax.nn.silu(h @ w("mlp.gate_proj").T)
            x = x + (gate * (h @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
        logits = norm(x, params["model.norm.weight"]) @ params["lm_head.weight"].T
        chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    def learning_rate(step):
        warm = PEAK_LR * (step + 1) / WARMUP
        done = jnp.clip((step - WARMUP) / (steps - WARMUP), 0, 1)
        cosine = FINAL_LR + (PEAK_LR - FINAL_LR) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return jnp.where(step < WARMUP, warm, cosine)

    def train_step(params, first, second, step, data, context):
        """One AdamW step; only matrices decay."""
        key = jax.random.fold_in(jax.random.key(SEED), step)
        starts = jax.random.randint(
            key, (TOKENS_PER_STEP // context,), 0, len(data) - context)
        batch = data[starts[:, None] + jnp.arange(context + 1)]
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        total = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
        scale = jnp.minimum(1.0, CLIP / (total + 1e-6))
        lr, (b1, b2) = learning_rate(step), BETAS
        new_params, new_first, new_second = {}, {}, {}
        for name, p in params.items():
            g = grads[name] * scale
            m = b1 * first[name] + (1 - b1) * g
            v = b2 * second[name] + (1 - b2) * g * g
            update = (m / (1 - b1 ** (step + 1))) / (
                jnp.sqrt(v / (1 - b2 ** (step + 1))) + EPSILON)
            decay = WEIGHT_DECAY if p.ndim == 2 else 0.0
            new_params[name] = p - lr * (update + decay * p)
            new_first[name], new_second[name] = m, v
        return new_params, new_first, new_second, loss

    train_step = jax.jit(train_step, static_argnames="context", donate_argnums=(0, 1, 2))
    evaluate = jax.jit(loss_of)

    def rounded(params):
        return {n: np.asarray(p).astype(ml_dtypes.bfloat16) for n, p in params.items()}

    def save(params):
        replace_file(directory / "model.safetensors",
                     safetensors.numpy.save(rounded(params), {"format": "pt"}))

    def held_out_loss(params, held, context):
        """Loss of the weights as saved, rounded to bf16."""
        params = {n: jnp.asarray(p, jnp.float32) for n, p in rounded(params).items()}
        whole, rest = windows(held, context)
        total = sum(float(evaluate(params, jnp.asarray(group))) * group[:, 1:].size
                    for group in np.split(whole, range(16, len(whole), 16)))
        if len(rest) > 1:
            total += float(evaluate(params, jnp.asarray(rest[None]))) * (len(rest) - 1)
        return total / (len(held) - 1)

    begin = time.time()
    tokens = load_tokens(text)
    training, held = split(tokens)
    rng = np.random.default_rng(SEED)
    params = {}
    for name, shape in tensor_shapes().items():
        if len(shape) == 1:
            value = np.ones(shape)
        else:
            value = rng.normal(0, CONFIG["initializer_range"], shape)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value /= math.sqrt(2 * layers)
        params[name] = jnp.asarray(value, jnp.float32)
    count = sum(p.size for p in params.values())
    print(f"{len(training)} training tokens, {len(held)} held out, "
          f"{count} parameters", flush=True)
    first = {n: jnp.zeros_like(p) for n, p in params.items()}
    second = {n: jnp.zeros_like(p) for n, p in params.items()}
    directory.mkdir(parents=True, exist_ok=True)
    write_settings(directory)
    data, recent = jnp.asarray(training), []
    for step in range(steps):
        context = CONTEXT if step < steps - long_steps else LONG_CONTEXT
        params, first, second, loss = train_step(
            params, first, second, step, data, context)
        recent.append(loss)
        if (step + 1) % 25 == 0:
            mean = float(jnp.mean(jnp.stack(recent)))
            recent.clear()
            print(f"step {step + 1:5d}  train {mean:.4f} nats/byte  "
                  f"{time.time() - begin:6.0f} s", flush=True)
        if (step + 1) % SAVE_EVERY == 0:
            save(params)
    save(params)
    print(f"trained in {time.time() - begin:.0f} s")
    for context in (CONTEXT, LONG_CONTEXT):
        report(held_out_loss(params, held, context), len(held) - 1, context)


def report(loss, count, context):
    print(f"held out, windows of {context}: {loss:.4f} nats/byte, "
          f"{loss / math.log(2):.4f} bits/byte over {count} tokens", flush=True)


# ---------------------------------------------------------------- check

def read_safetensors(path):
    """Every tensor of a bf16 file, widened to f32."""
    raw = path.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    tensors = {}
    for name, entry in json.loads(raw[8:8 + size]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", name
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        high = np.frombuffer(raw[start:end], "<u2").astype(np.uint32)
        tensors[name] = (high << 16).view(np.float32).reshape(entry["shape"])
    return tensors


class NumpyLlama:
    """Llama's forward pass, written from the checkpoint's own config.json."""

    def __init__(self, directory):
        self.config = json.loads((directory / "config.json").read_text())
        self.tensors = read_safetensors(directory / "model.safetensors")

    def normalise(self, x, name):
        variance = np.square(x).mean(-1, keepdims=True)
        return x / np.sqrt(variance + self.config["rms_norm_eps"]) * self.tensors[name]

    def project(self, x, name):
        return x @ self.tensors[name].T

    def heads(self, x, name, rotary):
        """(time, hidden) to (heads, time, head_dim), rotated if asked."""
        dim = self.config["head_dim"]
        y = self.project(x, name)
        y = y.reshape(len(x), -1, dim).transpose(1, 0, 2)
        if not rotary:
            return y
        inverse = 1.0 / self.config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
        angle = np.outer(np.arange(len(x)), np.concatenate([inverse, inverse]))
        half = np.concatenate([-y[..., dim // 2:], y[..., :dim // 2]], -1)
        return (y * np.cos(angle) + half * np.sin(angle)).astype(np.float32)

    def logits(self, ids):
        """Logits after each of the given ids."""
        config = self.config
        x = self.tensors["model.embed_tokens.weight"][ids]
        future = np.triu(np.full((len(ids), len(ids)), -np.inf, np.float32), 1)
        for i in range(config["num_hidden_layers"]):
            at = f"model.layers.{i}."
            h = self.normalise(x, at + "input_layernorm.weight")
            group = config["num_attention_heads"] // config["num_key_value_heads"]
            q = self.heads(h, at + "self_attn.q_proj.weight", True)
            k = self.heads(h, at + "self_attn.k_proj.weight", True).repeat(group, 0)
            v = self.heads(h, at + "self_attn.v_proj.weight", False).repeat(group, 0)
            score = q @ k.transpose(0, 2, 1) / np.float32(math.sqrt(config["head_dim"]))
            score = score + future
            score = np.exp(score - score.max(-1, keepdims=True))
            score /= score.sum(-1, keepdims=True)
            mixed = (score @ v).transpose(1, 0, 2).reshape(len(ids), -1)
            x = x + self.project(mixed, at + "self_attn.o_proj.weight")
            h = self.normalise(x, at + "post_attention_layernorm.weight")
            gate = self.project(h, at + "mlp.gate_proj.weight")
            gate = gate / (1 + np.exp(-gate))
            inner = gate * self.project(h, at + "mlp.up_proj.weight")
            x = x + self.project(inner, at + "mlp.down_proj.weight")
        return self.project(self.normalise(x, "model.norm.weight"), "lm_head.weight")

    def total_loss(self, window):
        logits = self.logits(window[:-1]).astype(np.float64)
        top = logits.max(-1)
        log_sum = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        return (log_sum - logits[np.arange(len(logits)), window[1:]]).sum()


def check(directory, text, prompt, length):
    model = NumpyLlama(directory)
    shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
    assert shapes == tensor_shapes(), "tensor names or shapes differ"
    ids = list(prompt.encode("utf-8"))
    for _ in range(length):
        best = int(model.logits(np.array(ids))[-1].argmax())
        if best >= EOT:
            break
        ids.append(best)
    print(f"greedy, {length} bytes: {bytes(ids).decode('utf-8', 'replace')!r}", flush=True)
    _, held = split(load_tokens(text))
    for context in (CONTEXT, LONG_CONTEXT):
        whole, rest = windows(held, context)
        total = sum(model.total_loss(window) for window in whole)
        if len(rest) > 1:
            total += model.total_loss(rest)
        report(total / (len(held) - 1), len(held) - 1, context)


def main():
    parser = argparse.ArgumentParser(
        description="Train, or check, the demo checkpoint: a small byte-level Llama.")
    parser.add_argument("--check", action="store_true",
                        help="check the saved files with numpy instead of training")
    parser.add_argument("--model", type=Path, default=DEFAULT_DIR,
                        help="folder of the checkpoint (default: demo/model)")
    parser.add_argument("--text", help="file with the output of "
                        "`bible -f gen1:1-rev22:21` (default: run that program)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--long-steps", type=int, default=LONG_STEPS)
    parser.add_argument("--prompt", default="In the beginning ")
    parser.add_argument("--length", type=int, default=200,
                        help="bytes in the sample of --check")
    args = parser.parse_args()
    if args.check:
        check(args.model, args.text, args.prompt, args.length)
    else:
        train(args.model, args.text, args.steps, args.long_steps)


if __name__ == "__main__":
    main()
