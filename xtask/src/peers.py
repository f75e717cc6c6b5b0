"""The peers that `cargo xtask peers` alternates with.

    peers.py version
    peers.py quantise SOURCE TARGET TYPE     a GGUF in another type; what is packed already is packed again
    peers.py llama MODEL THREADS             then `prefill N` or `decode N` a line, tokens a second back
    peers.py torch MODEL THREADS             the same in bf16, eager, from a GGUF through transformers
    peers.py samples MODEL TEXT N            the text as lines of N token ids each, by the model's own tokenizer
    peers.py perplexity MODEL THREADS LINES  tokens that have one before them, and exp of their mean -ln p

Decoding is greedy after 32 tokens, a prompt asks for the last token's scores alone: what ours does.
"""

import ctypes
import json
import math
import sys
import time

PROMPT = 32


def prompt(n, vocabulary):
    return [(i * 7919 + 13) % vocabulary for i in range(n)]


class Llama:
    def __init__(self, path, threads):
        import llama_cpp as lib

        self.lib = lib
        lib.llama_backend_init()
        quiet = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(quiet, ctypes.c_void_p(0))
        self.quiet = quiet
        params = lib.llama_model_default_params()
        self.model = lib.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            sys.exit(f"{path}: llama.cpp cannot load it")
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = 1024, 512, 512
        context.n_threads = context.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, context)
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.vocabulary = lib.llama_vocab_n_tokens(self.vocab)
        self.choose = lib.llama_sampler_init_greedy()

    def run(self, tokens):
        array = (self.lib.llama_token * len(tokens))(*tokens)
        batch = self.lib.llama_batch_get_one(array, len(tokens))
        if self.lib.llama_decode(self.context, batch) != 0:
            sys.exit("llama_decode failed")

    def next(self):
        return self.lib.llama_sampler_sample(self.choose, self.context, -1)

    def tokens(self, text):
        room = (self.lib.llama_token * (len(text) + 8))()
        n = self.lib.llama_tokenize(self.vocab, text, len(text), room, len(room), False, False)
        if n < 0:
            sys.exit("llama_tokenize failed")
        return list(room[:n])

    def surprise(self, tokens):
        """-ln p of every token but the first, each after those before it."""
        import numpy

        self.clear()
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if self.lib.llama_decode(self.context, batch) != 0:
            sys.exit("llama_decode failed")
        found = []
        for i, token in enumerate(tokens[1:]):
            row = self.lib.llama_get_logits_ith(self.context, i)
            row = numpy.ctypeslib.as_array(row, (self.vocabulary,)).astype(numpy.float64)
            top = row.max()
            found.append(top + numpy.log(numpy.exp(row - top).sum()) - row[token])
        self.lib.llama_batch_free(batch)
        return found

    def clear(self):
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def prefill(self, n):
        self.clear()
        tokens = prompt(n, self.vocabulary)
        start = time.perf_counter()
        self.run(tokens)
        self.lib.llama_synchronize(self.context)
        return n / (time.perf_counter() - start)

    def decode(self, n):
        self.clear()
        self.run(prompt(PROMPT, self.vocabulary))
        token = self.next()
        start = time.perf_counter()
        for _ in range(n):
            self.run([token])
            token = self.next()
        return n / (time.perf_counter() - start)


class Torch:
    def __init__(self, path, threads):
        import os

        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch = torch
        folder, name = os.path.split(path)
        self.model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
        self.model.eval()
        self.vocabulary = self.model.config.vocab_size

    def prefill(self, n):
        tokens = self.torch.tensor([prompt(n, self.vocabulary)])
        start = time.perf_counter()
        self.model(tokens, use_cache=True, logits_to_keep=1)
        return n / (time.perf_counter() - start)

    def decode(self, n):
        tokens = self.torch.tensor([prompt(PROMPT, self.vocabulary)])
        out = self.model(tokens, use_cache=True, logits_to_keep=1)
        start = time.perf_counter()
        for _ in range(n):
            token = out.logits[:, -1:].argmax(-1)
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
        out.logits[:, -1:].argmax(-1)
        return n / (time.perf_counter() - start)


def quantise(source, target, kind):
    import llama_cpp as lib

    params = lib.llama_model_quantize_default_params()
    params.allow_requantize = True
    # Every tensor in the same type, the embedding too.
    params.pure = True
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) != 0:
        sys.exit(f"{source}: llama.cpp cannot make {kind} of it")


def serve(arm):
    print("ready", flush=True)
    for line in sys.stdin:
        phase, n = line.split()
        print(f"{getattr(arm, phase)(int(n)):.2f}", flush=True)


def main(args):
    match args:
        case ["version"]:
            import llama_cpp as lib

            print(lib.__version__)
            print(lib.llama_print_system_info().decode().strip())
        case ["quantise", source, target, kind]:
            quantise(source, target, kind)
        case ["llama", path, threads]:
            serve(Llama(path, int(threads)))
        case ["torch", path, threads]:
            serve(Torch(path, int(threads)))
        case ["samples", path, text, n]:
            with open(text, "rb") as file:
                tokens = Llama(path, 1).tokens(file.read())
            for at in range(0, len(tokens), int(n)):
                print(json.dumps({"tokens": tokens[at : at + int(n)]}))
        case ["perplexity", path, threads, lines]:
            arm = Llama(path, int(threads))
            with open(lines) as file:
                samples = [json.loads(line)["tokens"] for line in file]
            surprise = [v for tokens in samples for v in arm.surprise(tokens)]
            perplexity = math.exp(math.fsum(surprise) / len(surprise))
            print(json.dumps({"tokens": len(surprise), "perplexity": perplexity}))
        case _:
            sys.exit(__doc__)


main(sys.argv[1:])
