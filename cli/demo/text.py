"""The demo's real text and its tokenizer, both from what is at hand: this repository, or the installed package.

Nothing is downloaded: the tokenizer is a byte-level BPE (Sennrich et al. 2016, over bytes as GPT-2 does it) trained on
the spot in about a second.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import kvredis

VOCABULARY = 4096
TRAINING_CHARS_MAX = 1_000_000
CHARS_PER_TOKEN_MAX = 12
"""More text than this per token is never needed to fill a prompt: source code and prose come to 3-4."""


def own_texts() -> list[tuple[str, str]]:
    """(name, text) of the licence and the documents, then of the sources, in an order that only the files decide."""
    package = Path(kvredis.__file__).parent
    root = package.parent
    paths: list[Path] = []
    if (root / "pyproject.toml").exists():
        paths += [path for path in (root / "LICENSE",) if path.exists()]
        paths += sorted(root.glob("*.md"))
    paths += sorted(package.glob("*.py"))
    for room in sorted(path for path in package.iterdir() if path.is_dir()):
        paths += sorted(room.rglob("*.py"))  # from each room, because rglob does not enter linked folders by itself
    return [(str(path.relative_to(root)), path.read_text(encoding="utf-8")) for path in paths]


def train(texts: list[tuple[str, str]]) -> Tokenizer:
    """A byte-level BPE of at most VOCABULARY tokens, trained on the texts; it can encode anything."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = "\n".join(text for _, text in texts)[:TRAINING_CHARS_MAX]
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer=trainer)
    return tokenizer


def prompt_ids(tokenizer: Tokenizer, texts: list[tuple[str, str]], *, tokens_max: int, salt: str) -> list[int]:
    """Up to `tokens_max` token ids of the texts, one after the other; a salt in front changes every chunk of them."""
    chars_max = tokens_max * CHARS_PER_TOKEN_MAX
    whole = "\n".join(f"==> {name} <==\n{text}" for name, text in texts)[:chars_max]
    ids = tokenizer.encode(f"[{salt}]\n{whole}" if salt else whole).ids
    return ids[:tokens_max]
