"""Tokenizers of the families that are exported, and texts that are hard for them."""

import random
import re

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]

# How words are told apart: Llama 3 takes digits three at a time, Qwen one at a time.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*first, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not first or len(first) > 1)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first[:1], last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}


def split(digits):
    return pre_tokenizers.Split(Regex(WORDS.format(digits=digits)), behavior="isolated")


def sentence_piece():
    """As Llama 2 and Mistral: blanks become part of words, unknown letters bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer, {"special_tokens": ["<unk>", *SPECIAL, *(f"<0x{x:02X}>" for x in range(256))]}


FAMILIES = {
    "smollm2": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), None),
    "llama3": lambda: byte_level(split("{1,3}")),
    "qwen2": lambda: byte_level(split(""), normalizer=normalizers.NFC()),
    "llama2": sentence_piece,
}


def make_tokenizer(family: str, text: str) -> PreTrainedTokenizerFast:
    """Train a tokenizer with 2,000 tokens, which puts <s> in front."""
    tokenizer, options = FAMILIES[family]()
    options = {"special_tokens": SPECIAL, "vocab_size": 2000, "show_progress": False, **options}
    tokenizer.train_from_iterator(text.splitlines(keepends=True), BpeTrainer(**options))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )


# Letters of many scripts, combining marks, controls, emoji, unassigned code points.
RANGES = [
    (int(begin, 16), int(end, 16))
    for begin, end in re.findall(
        r"(\w+)-(\w+)",
        "0-7f 80-24f 300-36f 370-7ff 900-dff 1100-11ff 2000-206f 3000-30ff 4e00-9fff ac00-d7a3 "
        "fe00-ffff 10000-10fff 1d400-1d7ff 1f300-1f6ff e0000-e01ef",
    )
]


def hostile_texts(count: int, seed: int = 0) -> list[str]:
    """Return short random texts, and some that are known to be hard."""
    rng = random.Random(seed)
    known = [
        "",
        " ",
        "\n\n \t",
        "a\0b\0",
        "e\u0301 é ﬁ Å",
        "it'S 12345 ½ ²³",
        "▁ ▁x",
        "<s></s><|end|>x",
    ]
    texts = (
        "".join(chr(rng.randint(*rng.choice(RANGES))) for _ in range(rng.randint(1, 30)))
        for _ in range(count)
    )
    return [*known, *texts]
