#!/usr/bin/env python3
"""Makes the token fixtures of host/models/tests/fixtures: a text corpus, small tokenizers of every kind, their ids.

    pip install tokenizers gguf numpy llama-cpp-python
    scripts/token_cases.py host/models/tests/fixtures

Writes `lines.json.gz` (the corpus), `<name>.tokenizer.json.gz` with `<name>.ids.gz` from the Python package
`tokenizers`, and `<name>.gguf.gz` with `<name>.ids.gz` from llama.cpp reading the same file (vocabulary only).
An ids file has a line a text, ids in base 36; `pre_<name>.crc` has four bytes a text instead, the CRC-32 of such a
line; `<name>.texts.gz` has what the ids decode to, where that is not the text. Everything is made from the seed below; texts are
made here, none is quoted from anywhere.
"""
import gzip
import json
import random
import sys
import zlib
from pathlib import Path

SEED = 20
LINES = 2100

# Letters of many scripts: a word is made of letters of one of them.
SCRIPTS = {
    "latin": "abcdefghijklmnopqrstuvwxyz", "accents": "àáâãäåæçèéêëìíîïñòóôõöøùúûüýÿœšžßđłğıİ",
    "greek": "αβγδεζηθικλμνξοπρστυφχψωςάέήίόύώ", "cyrillic": "абвгдежзийклмнопрстуфхцчшщъыьэюяёіїєґ",
    "armenian": "աբգդեզէըթժիլխծկհձղճմյնշոչպջռսվտրցւփքօֆ", "georgian": "აბგდევზთიკლმნოპჟრსტუფქღყშჩცძწჭხჯჰ",
    "hebrew": "אבגדהוזחטיכלמנסעפצקרשתםןףץך", "arabic": "ابتثجحخدذرزسشصضطظعغفقكلمنهويىةءآأؤإئ",
    "devanagari": "अआइईउऊएऐओऔकखगघचछजझटठडढणतथदधनपफबभमयरलवशषसहािीुूेैोौ्ंः",
    "bengali": "অআইউএওকখগঘচছজটডতথদনপফবভমযরলশষসহািীুেো্ং", "tamil": "அஆஇஈஉஊஎஏஐஒஓகஙசஞடணதநபமயரலவழளறனாிீுூெேைொோ்",
    "telugu": "అఆఇఈఉఊఎఏఒఓకఖగఘచజటడణతథదధనపఫబభమయరలవశషసహాిీుూెేొో్ం",
    "thai": "กขคงจฉชซญฎฏฐณดตถทธนบปผฝพฟภมยรลวศษสหฬอฮะาิีึืุูเแโใไ่้๊๋์", "lao": "ກຂຄງຈສຊຍດຕຖທນບປຜຝພຟມຢຣລວຫອຮະາິີຶືຸູເແໂໃໄ່້",
    "khmer": "កខគឃងចឆជឈញដឋឌឍណតថទធនបផពភមយរលវសហឡអាិីឹឺុូួើឿៀេែៃោៅំះ្", "burmese": "ကခဂဃငစဆဇဈညတထဒဓနပဖဗဘမယရလဝသဟအာိီုူေဲံ့း္်",
    "hiragana": "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよらりるれろわをん",
    "katakana": "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロワヲンー",
    "han": "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后小么",
    "hangul": "가나다라마바사아자차카타파하거너더러머버서어저처커터퍼허고노도로모보소오조초코토포호",
    "ethiopic": "ሀሁሂሃሄህሆለሉሊላሌልሎሐመሙሚማሜምሞረሩሪራሬርሮ", "cherokee": "ᎠᎡᎢᎣᎤᎥᎦᎧᎨᎩᎪᎫᎬᎭᎮᎯ", "tibetan": "ཀཁགངཅཆཇཉཏཐདནཔཕབམཙཚཛཝཞཟའཡརལཤསཧཨིེོུ་",
    "mongolian": "ᠠᠡᠢᠣᠤᠥᠦᠨᠩᠪᠫᠬᠭᠮᠯᠰᠱᠲᠳᠴᠵᠶᠷ", "deseret": "𐐨𐐩𐐪𐐫𐐬𐐭𐐮𐐯𐐀𐐁𐐂", "math": "𝐀𝐁𝐂𝒶𝒷𝒸𝔸𝔹𝕏𝛼𝛽𝟎𝟏𝟗", "fullwidth": "ＡＢＣａｂｃ０１２，．！",
}
EMOJI = ["😀", "👍🏽", "👩‍👩‍👧", "🇩🇪", "❤️", "🏳️‍🌈", "1️⃣", "🧑🏿‍🚀", "☃", "♞", "🀄"]
MARKS = ["\u0301", "\u0308", "\u0327", "\u20dd", "\u0e49", "\u093c", "\u0591", "\ufe0f"]
SPACES = [" ", "  ", "   ", "     ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r\n\r\n", "\r", " \n", "\n ", "\u00a0", "\u3000",
          "\u2003", "\u2028", "\u202f", "\u205f", "\u1680", "\x0b", "\x0c", "\x85", " \t ", "\n\n\n   ", "   \n\t"]
CONTROLS = ["\x00", "\x01", "\x07", "\x1b[0m", "\x7f", "\u00ad", "\u200b", "\u200c", "\u200d", "\u200e", "\u2060", "\ufeff",
            "\ufffd", "\ufffe", "\ue000", "\U000f0000", "\U0010ffff", "\u0378"]
SIGNS = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + ["…", "—", "–", "“", "”", "‘", "’", "«", "»", "¿", "¡", "。", "、", "，",
         "！", "？", "٪", "؟", "।", "۔", "€", "£", "¥", "₹", "°", "±", "×", "÷", "√", "∞", "≤", "→", "©", "™", "§", "¶", "•", "½", "²", "Ⅷ", "①", "٣", "५", "๓"]
NUMBERS = ["0", "7", "42", "123", "1234", "12345", "123456", "1234567890", "3.14", "1,000,000", "1e-5", "0xFF", "2024-01-31", "12:34:56", "٠١٢٣٤", "१२३४५", "１２３４", "1st", "v2.0.1", "1/2", "50%", "-17"]
ENDINGS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'T", "'RE", "'VE", "'M", "'LL", "'D", "'ſ", "’s", "'xyz", "'", "''s"]
CODE = ["fn main() {\n    let x = 1;\n}", "if (a == b && !c) { return a->b[0]; }", "def f(self, *args, **kw):\n\treturn None  # nothing", "SELECT * FROM t WHERE id = 'x';",
        "<div class=\"a\">&nbsp;</div>", "for(i=0;i<10;i++)\n\n\n        k+=i;", "https://example.org/a?b=c&d=%20#e", "user.name@example.org", "C:\\dir\\file.txt", "x^2 + y_1 \\frac{a}{b}", "camelCaseName snake_case_name SCREAMING_CASE XMLHttpRequest", "a.b.c::d<e>()", "\\n\\t\\u0041"]
WORDS = ["the", "of", "and", "to", "in", "that", "it", "was", "for", "on", "with", "as", "have", "this", "not", "you", "from", "which", "when", "river", "house", "city", "garden", "winter", "letter", "people", "water", "morning", "window", "mountain", "question", "answer", "night", "Hello", "World", "READ", "iPhone", "McDonald", "naïve", "café", "Zürich", "smörgåsbord"]
WHOLE = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "[MASK]", "[CLS]", "<pad>", "<image>", "<|end", "|>", "<s", "[MASK", "<tool>  </tool>"]
SPECIAL = ["<unk>", "<s>", "</s>", "<|begin|>", "<|im_start|>", "<|im_end|>"]
GIVEN = ["<image>", "<tool>", "</tool>"]


def corpus():
    r = random.Random(SEED)
    def word():
        if r.random() < 0.5:
            return r.choice(WORDS)
        letters = r.choice(list(SCRIPTS.values()))
        w = "".join(r.choice(letters) for _ in range(r.randint(1, 9)))
        return r.choice([w, w, w, w.upper(), w.title()])
    def bit():
        k = r.random()
        if k < 0.62: return word()
        if k < 0.70: return r.choice(SIGNS) * r.choice([1, 1, 1, 2, 3, 7])
        if k < 0.76: return r.choice(NUMBERS)
        if k < 0.80: return word() + r.choice(ENDINGS)
        if k < 0.83: return r.choice(EMOJI)
        if k < 0.86: return word()[:3] + r.choice(MARKS) * r.randint(1, 3) + word()[:2]
        if k < 0.89: return r.choice(CONTROLS)
        if k < 0.92: return r.choice(CODE)
        if k < 0.95: return r.choice(WHOLE)
        if k < 0.97: return "".join(chr(r.choice([r.randrange(0x20, 0x3000), r.randrange(0x3000, 0xd7ff), r.randrange(0xe000, 0xffff), r.randrange(0x10000, 0x1ffff)])) for _ in range(3))
        return r.choice(SPACES)
    out = ["", " ", "  ", "\n", "a", " a", "a ", "  a  b  ", "\u00e9", "e\u0301", "\u1e9b\u0323", "\ufb01", "\u212b", "ﷺ", "\r\na", "a\r\n", " \n a"]
    out += CODE + WHOLE + EMOJI + NUMBERS + ["the" + e for e in ENDINGS] + SPACES + CONTROLS + SIGNS
    out += ["a" + s + "b" for s in SPACES] + ["a" + s for s in SPACES] + [s + "b" for s in SPACES]
    out += [s + w + s for w in WHOLE for s in (" ", "", "\n")] + [WHOLE[i] + WHOLE[i + 1] for i in range(len(WHOLE) - 1)]
    out += ["a" * n for n in (5, 33, 300)] + [" " * n for n in (16, 100, 2000)] + ["\n" * 50, "=" * 80, "1" * 50, "的" * 40, "ab " * 60]
    while len(out) < LINES:
        pieces = [bit() for _ in range(r.randint(1, 7))]
        out.append("".join(p + (" " if r.random() < 0.7 else r.choice(["", "", ""] + SPACES)) for p in pieces))
    return out


def pack(rows):
    """A line a row: numbers in base 36, words of a row with a space between."""
    def b36(n):
        s = ""
        while True:
            n, d = divmod(n, 36)
            s = "0123456789abcdefghijklmnopqrstuvwxyz"[d] + s
            if n == 0: return s
    return "\n".join(" ".join(b36(i) for i in row) for row in rows)


def put(path, text):
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    with open(path, "wb") as f, gzip.GzipFile("", "wb", 9, f, 0) as z:
        z.write(data)
    print(f"{path.name}: {path.stat().st_size} bytes")


def other_texts(lines, texts):
    """By index, those that are not the text itself."""
    return json.dumps({i: t for i, (l, t) in enumerate(zip(lines, texts)) if l != t}, separators=(",", ":"))


def pieces_text(model, row):
    """The pieces of tokens one after another; the package's own way cuts each at 32 bytes."""
    import ctypes
    import llama_cpp
    buffer = ctypes.create_string_buffer(4096)
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    out = b""
    for token in row:
        n = llama_cpp.llama_token_to_piece(vocab, token, buffer, 4096, 0, True)
        out += buffer.raw[:max(n, 0)]
    return out.decode("utf-8", "replace")


# What the newer splits are in tokenizer.json files.
CONTRACT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UP_TO_3 = CONTRACT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ONE = UP_TO_3.replace("{1,3}", "")
CASES = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEP = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]


def published(lines):
    """Small tokenizers of every kind that `tokenizer.json` files hold."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers as pre, processors, trainers
    added = [AddedToken(t, special=True) for t in SPECIAL] + [AddedToken(t, lstrip=t == "<image>", rstrip=t == "<tool>") for t in GIVEN]
    def split(*patterns):
        return pre.Sequence([pre.Split(Regex(p), "isolated") for p in patterns] + [pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    def byte_level(pre_tokenizer, normalizer=None, **kw):
        t = Tokenizer(models.BPE(**kw))
        t.pre_tokenizer, t.decoder = pre_tokenizer, decoders.ByteLevel()
        if normalizer: t.normalizer = normalizer
        t.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIAL, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False))
        return t
    yield "gpt2", byte_level(pre.ByteLevel(add_prefix_space=False))
    t = byte_level(split(UP_TO_3), ignore_merges=True)
    t.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", t.token_to_id("<|begin|>"))])
    yield "up_to_three", t
    yield "one_composed", byte_level(split(ONE), normalizers.NFC())
    yield "cases", byte_level(split(CASES))
    yield "sequence", byte_level(split(*DEEP))
    yield "digits", byte_level(pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=True)]))
    def metaspace(model, trainer):
        t = Tokenizer(model)
        t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        t.train_from_iterator([l[:200] for l in lines], trainer)
        return t
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    yield "metaspace_bpe", metaspace(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"), trainers.BpeTrainer(vocab_size=1200, special_tokens=SPECIAL + byte_tokens, limit_alphabet=300, show_progress=False))
    t = Tokenizer(models.Unigram())
    t.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    t.pre_tokenizer, t.decoder = pre.Metaspace(), decoders.Metaspace()
    few = ["".join(c for c in l if c < "\u0250")[:200] for l in lines]
    t.train_from_iterator(few, trainers.UnigramTrainer(vocab_size=900, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False))
    t.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", t.token_to_id("</s>"))])
    yield "unigram", t
    t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    t.normalizer, t.pre_tokenizer, t.decoder = normalizers.BertNormalizer(), pre.BertPreTokenizer(), decoders.WordPiece()
    t.train_from_iterator(lines, trainers.WordPieceTrainer(vocab_size=1000, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], limit_alphabet=400, show_progress=False))
    t.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    yield "wordpiece", t


PRES = ["default", "gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "dbrx", "glm4", "falcon", "deepseek-llm", "deepseek-coder", "deepseek-v3", "tekken", "gpt-4o", "bloom", "viking", "bailingmoe", "seed-coder", "exaone-moe", "minicpm5", "jais-2", "superbpe", "ufakzeka", "granite-embed-multi-97m"]


def stored(out, made):
    """The same vocabularies as GGUF files, for the names of pre-tokenizers and the other two models."""
    import gguf
    def file(name, model, tokens, types, scores=None, merges=None, pre=None, named=None, **flags):
        path = out / f"{name}.gguf"
        w = gguf.GGUFWriter(path, "llama")
        if named: w.add_name(named)
        w.add_tokenizer_model(model)
        if pre: w.add_tokenizer_pre(pre)
        w.add_token_list(tokens)
        w.add_token_types(types)
        if scores: w.add_token_scores(scores)
        if merges: w.add_token_merges(merges)
        for key, value in flags.items():
            key = f"tokenizer.ggml.{key.replace('__', '.')}"
            (w.add_bool if isinstance(value, bool) else w.add_uint32)(key, value)
        w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
        return path
    doc = json.loads(made["gpt2"].to_str())
    vocab = doc["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get) + GIVEN
    types = [3 if t in SPECIAL else 4 if t in GIVEN else 1 for t in tokens]
    merges = [" ".join(m) if isinstance(m, list) else m for m in doc["model"]["merges"]]
    yield "stored_merges", file("stored_merges", "gpt2", tokens, types, merges=merges, pre="gpt-2", bos_token_id=3, eos_token_id=5, add_bos_token=True)
    doc = json.loads(made["metaspace_bpe"].to_str())
    vocab = doc["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    rank = {("".join(m) if isinstance(m, list) else m.replace(" ", "")): -float(i) for i, m in enumerate(doc["model"]["merges"])}
    types = [2 if t == "<unk>" else 3 if t in SPECIAL else 6 if t.startswith("<0x") else 1 for t in tokens]
    # Given by the user, as published vocabularies have runs of spaces and lines. The reader wants no token twice.
    more = [t for t in GIVEN + ["▁▁▁▁", "\n\n", "\t"] if t not in vocab]
    tokens, types = tokens + more, types + [4] * len(more)
    scores = [rank.get(t, 0.0 if types[i] != 1 else -1e4) for i, t in enumerate(tokens)]
    ties = [round(s / 40) * 40.0 for s in scores]
    ids = dict(bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    yield "stored_scores", file("stored_scores", "llama", tokens, types, scores, **ids)
    yield "stored_ties", file("stored_ties", "llama", tokens, types, ties, add_space_prefix=False, add_bos_token=False, add_eos_token=True, **ids)
    # A name by which readers know that whole tokens take the spaces behind them away.
    renamed = ["<|endoftext|>" if t == "<|im_end|>" else t for t in tokens]
    yield "stored_trims", file("stored_trims", "llama", renamed, types, scores, named="Phi-3 of these lines", **ids)
    doc = json.loads(made["wordpiece"].to_str())
    vocab = doc["model"]["vocab"]
    tokens = [t[2:] if t.startswith("##") and len(t) > 2 else t if t.startswith("[") and t.endswith("]") and len(t) > 2 else "▁" + t for t in sorted(vocab, key=vocab.get)]
    types = [3 if t.startswith("[") and t.endswith("]") and len(t) > 2 else 1 for t in tokens]
    yield "stored_words", file("stored_words", "bert", tokens, types, bos_token_id=2, seperator_token_id=3, unknown_token_id=1, padding_token_id=0)


def masks(out, data, lines, ids):
    """The file with one token renamed and a name under which readers take the spaces in front of it away."""
    pre = b"jina-v2-de"
    data = data.replace(b"<tool>", b"<mask>")
    key = b"tokenizer.ggml.pre" + (8).to_bytes(4, "little")
    at = data.index(key) + len(key)
    size = int.from_bytes(data[at:at + 8], "little")
    other = out / "mask.gguf"
    other.write_bytes(data[:at] + len(pre).to_bytes(8, "little") + pre + data[at + 8 + size:])
    _, rows = ids(other, [l.replace("<tool>", "<mask>") for l in lines])
    sums = [zlib.crc32(row.encode()) for row in pack(rows).split("\n")]
    (out / "mask_jina-v2-de.sums").write_bytes(b"".join(c.to_bytes(4, "little") for c in sums))
    other.unlink()


def main(out):
    from llama_cpp import Llama
    out.mkdir(parents=True, exist_ok=True)
    lines = corpus()
    put(out / "lines.json.gz", json.dumps(lines, ensure_ascii=True, separators=(",", ":")))
    made = {}
    for name, t in published(lines):
        if name not in ("wordpiece",):
            from tokenizers import AddedToken
            t.add_tokens([AddedToken(g, lstrip=g == "<image>", rstrip=g == "<tool>", normalized=False) for g in GIVEN])
        made[name] = t
        put(out / f"{name}.tokenizer.json.gz", t.to_str())
        rows = [t.encode(l).ids for l in lines]
        put(out / f"{name}.ids.gz", pack(rows))
        put(out / f"{name}.texts.gz", other_texts(lines, [t.decode(r, skip_special_tokens=False) for r in rows]))
    def ids(path, texts=lines):
        model = Llama(str(path), vocab_only=True, verbose=False)
        return model, [model.tokenize(l.encode("utf-8", "surrogatepass"), add_bos=True, special=True) for l in texts]
    for name, path in stored(out, made):
        model, rows = ids(path)
        put(out / f"{name}.gguf.gz", path.read_bytes())
        put(out / f"{name}.ids.gz", pack(rows))
        texts = [pieces_text(model, r) for r in rows]
        put(out / f"{name}.texts.gz", other_texts(lines, texts))
        if name == "stored_merges":
            data = path.read_bytes()
            for pre in PRES:
                # The same file under another name: the length of the text is in front of it.
                key = b"tokenizer.ggml.pre" + (8).to_bytes(4, "little")
                at = data.index(key) + len(key)
                size = int.from_bytes(data[at:at + 8], "little")
                other = out / "pre.gguf"
                other.write_bytes(data[:at] + len(pre).to_bytes(8, "little") + pre.encode() + data[at + 8 + size:])
                if pre != "gpt-2":
                    _, rows = ids(other)
                    sums = [zlib.crc32(row.encode()) for row in pack(rows).split("\n")]
                    (out / f"pre_{pre}.crc").write_bytes(b"".join(c.to_bytes(4, "little") for c in sums))
                other.unlink()
            masks(out, path.read_bytes(), lines, ids)
        path.unlink()


main(Path(sys.argv[1]))
