"""The offline task: short reviews from a small grammar of our own, their tokenizer, and the gold score of a text.

A review is one to three sentences about one film, meal or book. Each sentence follows one of twelve patterns. A pattern
is a line of words with slots in braces: the same line makes sentences and, as a regular expression, recognises them.
"""

import math
import random
import re
from functools import cache
from itertools import product

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

PATTERNS = (
    "the {part} was {view} .",
    "the {part} of this {thing} was {view} .",
    "the {part} was {view} and the {part} was {view} .",
    "the {part} was {view} while the {part} was {view} .",
    "{when} i {tried} this {thing} and it was {view} .",
    "my {person} and i {tried} the {thing} {when} .",
    "i {felt} the {part} .",
    "{when} my {person} {felt} the {thing} .",
    "for my {person} the {thing} was {view} .",
    "this {adjective} {thing} made {us} {mood} .",
    "we {tried} the {thing} for its {adjective} {part} .",
    "i would {advice} this {thing} .",
)

# A slot with a minus sign is filled from the opposite sentiment: "not bad" praises.
PHRASES = {
    "view": (
        *("{adjective}",) * 3,
        *("{degree} {adjective}",) * 2,
        "not {-adjective}",
        "not {degree} {-adjective}",
    ),
    "felt": (*("{loved}",) * 3, "did not {-love}"),
    "advice": (*("{recommend}",) * 3, "not {-recommend}"),
}

NEUTRAL = {
    "when": (
        "yesterday",
        "today",
        "tonight",
        "earlier",
        "recently",
        "lately",
        "finally",
        "once",
        "last week",
        "last night",
    ),
    "person": (
        *("friend", "teacher", "neighbour", "sister", "brother", "mother", "father"),
        *("wife", "husband", "aunt", "uncle", "cousin"),
    ),
    "degree": ("very", "really", "quite", "so"),
    "us": ("me", "us", "everyone"),
}

DOMAINS = {
    "film": {
        "thing": ("film", "movie", "comedy", "western"),
        "part": ("acting", "plot", "music", "ending", "cast", "script"),
        "tried": ("watched", "saw", "rented"),
    },
    "food": {
        "thing": ("meal", "dinner", "dish", "lunch"),
        "part": ("sauce", "soup", "bread", "salad", "service", "coffee"),
        "tried": ("ate", "ordered", "shared"),
    },
    "book": {
        "thing": ("book", "novel", "memoir", "thriller"),
        "part": ("prose", "story", "dialogue", "style", "narrator", "cover"),
        "tried": ("read", "finished", "borrowed"),
    },
}

# Valences: how strongly a word praises (above 0) or blames (below 0).
PRAISE = {
    "adjective": {
        "wonderful": 3,
        "excellent": 3,
        "brilliant": 3,
        "superb": 3,
        "great": 3,
        "delightful": 3,
        "good": 2,
        "lovely": 2,
        "charming": 2,
        "clever": 2,
        "pleasant": 2,
        "fresh": 1,
        "decent": 1,
        "fine": 1,
    },
    "loved": {"loved": 3, "adored": 3, "enjoyed": 2, "liked": 2},
    "love": {"love": 3, "adore": 3, "enjoy": 2, "like": 2},
    "mood": {"happy": 3, "cheerful": 2, "proud": 2, "smile": 1},
    "recommend": {"recommend": 2, "praise": 3, "choose": 1},
}
BLAME = {
    "adjective": {
        "terrible": -3,
        "awful": -3,
        "dreadful": -3,
        "horrible": -3,
        "dismal": -3,
        "bad": -2,
        "boring": -2,
        "dull": -2,
        "poor": -2,
        "stale": -2,
        "clumsy": -2,
        "bland": -1,
        "weak": -1,
        "odd": -1,
    },
    "loved": {"hated": -3, "loathed": -3, "disliked": -2, "resented": -2},
    "love": {"hate": -3, "loathe": -3, "dislike": -2, "resent": -2},
    "mood": {"angry": -3, "sad": -2, "tired": -2, "yawn": -1},
    "recommend": {"avoid": -2, "condemn": -3, "skip": -1},
}
VALENCE = {word: valence for words in (*PRAISE.values(), *BLAME.values()) for word, valence in words.items()}
OPINIONS = ("view", "felt", "advice", "adjective", "mood")

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
SHORTEST, LONGEST = 8, 24
SLOT = re.compile(r"\{(-?)(\w+)\}")
OPINION = re.compile("|".join(f"{{{name}}}" for name in OPINIONS))


# The grammar


def make_reviews(n: int, seed: int) -> list[str]:
    """n reviews drawn from the grammar of our own: words and "." separated by single spaces, 8 to 24 tokens each.

    The latent sentiment of a review is praise (0.4), blame (0.4) or mixed (0.2): one opinion praises, all others blame.
    No review repeats an opinion word or speaks of one part of the film, meal or book twice. A larger n adds reviews at
    the end and leaves the first ones as they are.
    """
    rng = random.Random(seed)
    return [_review(rng) for _ in range(n)]


def prompts(n: int, seed: int) -> list[str]:
    """n different openings of 2 to 5 neutral words, each of which can go on to praise, to blame or to do both.

    They are the beginnings of the grammar's sentences. Raises ValueError for more than there are.
    """
    openings = _openings()
    if not 0 <= n <= len(openings):
        raise ValueError(f"n must lie between 0 and {len(openings)}, the number of openings, got {n}")
    return random.Random(seed).sample(openings, n)


def _review(rng: random.Random) -> str:
    """Draw until a review has the right length, repeats nothing and holds the opinions its sentiment needs."""
    domain = rng.choice(list(DOMAINS))
    sentiment = rng.choices(("praise", "blame", "mixed"), (0.4, 0.4, 0.2))[0]
    while True:
        patterns = rng.sample(PATTERNS, rng.choice((1, 2, 3)))
        count = len(OPINION.findall(" ".join(patterns)))
        if count < (2 if sentiment == "mixed" else 1):
            continue
        signs = [1 if sentiment == "praise" else -1] * count
        if sentiment == "mixed":
            signs[rng.randrange(count)] = 1
        text = " ".join(_fill(pattern, domain, signs, rng) for pattern in patterns)
        words = text.split()
        one_each = all(words.count(part) < 2 for part in DOMAINS[domain]["part"])
        if SHORTEST <= len(words) <= LONGEST and one_each and not repetition(text):
            return text


def _fill(pattern: str, domain: str, signs: list[int], rng: random.Random) -> str:
    """A sentence of a pattern. Each opinion takes the next of the signs off the list."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        return choose(name, signs.pop(0) if name in OPINIONS else 1)

    def choose(name: str, sign: int) -> str:
        phrase = rng.choice(_options(name, domain, sign))
        return SLOT.sub(lambda inner: choose(inner[2], -sign if inner[1] else sign), phrase)

    return SLOT.sub(fill, pattern)


def _options(name: str, domain: str, sign: int) -> tuple[str, ...]:
    """What may stand in a slot."""
    opinions = PRAISE if sign > 0 else BLAME
    return tuple((PHRASES | NEUTRAL | DOMAINS[domain] | opinions)[name])


@cache
def _openings() -> list[str]:
    """Every beginning of 2 to 5 neutral words, in alphabetical order."""
    found = set()
    for domain, pattern in product(DOMAINS, PATTERNS):
        neutral = OPINION.split(pattern)[0].removesuffix(" .")
        slots = [_options(name, domain, 1) for _, name in SLOT.findall(neutral)]
        for words in product(*slots):
            fillers = iter(words)
            opening = SLOT.sub(lambda _, fillers=fillers: next(fillers), neutral).split()
            found |= {" ".join(opening[:length]) for length in range(2, min(5, len(opening)) + 1)}
    return sorted(found)


@cache
def _review_regexes() -> list[re.Pattern[str]]:
    """One regular expression a domain: one or more sentences of the patterns."""

    def alternatives(name: str, domain: str) -> str:
        options = dict.fromkeys(_options(name, domain, 1) + _options(name, domain, -1))
        return "(?:" + "|".join(expression(option, domain) for option in options) + ")"

    def expression(line: str, domain: str) -> str:
        return SLOT.sub(lambda match: alternatives(match[2], domain), line.replace(".", r"\."))

    regexes = []
    for domain in DOMAINS:
        sentence = "(?:" + "|".join(expression(pattern, domain) for pattern in PATTERNS) + ")"
        regexes.append(re.compile(f"{sentence}(?: {sentence})*"))
    return regexes


# The tokenizer


@cache
def vocabulary() -> list[str]:
    """The special tokens <pad>, <bos>, <eos>, <unk>, then every word of the grammar in alphabetical order."""
    lines = [*PATTERNS, *VALENCE]
    for slots in (PHRASES, NEUTRAL, *DOMAINS.values()):
        lines += [option for options in slots.values() for option in options]
    words = {word for line in lines for word in SLOT.sub("", line).split()}
    return [*SPECIAL, *sorted(words)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer of our own for the reviews: `tokenizer(text)` gives <bos> and one id a word, no <eos>.

    Pads on the left. Decoding joins the words by single spaces.
    """
    ids = {word: index for index, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


# The gold score, which no training sees


def sentiment(text: str) -> float:
    """How much a text praises, in (−1, 1):  s = v / √(v² + 15), our own score.

    v is the sum of the valences of the opinion words. "not" turns the next opinion word of its sentence, x, into −x/2:
    "not terrible" is faint praise.
    """
    total, negated = 0.0, False
    for word in text.split():
        if word in VALENCE:
            total += -VALENCE[word] / 2 if negated else VALENCE[word]
        if word == "not":
            negated = True
        elif word in VALENCE or word == ".":
            negated = False
    return total / math.sqrt(total**2 + 15)


def is_grammatical(text: str, finished: bool = True) -> bool:
    """Whether a text consists of whole sentences of the grammar of our own, all about one domain.

    finished: whether the writer ended it with <eos>; a text cut off is never grammatical.
    """
    return finished and any(regex.fullmatch(text) for regex in _review_regexes())


def repetition(text: str) -> bool:
    """Whether a sentence or an opinion word occurs twice: a fault of style of our own definition."""
    sentences = [part.strip() for part in text.split(" .") if part.strip()]
    opinions = [word for word in text.split() if word in VALENCE]
    return len(set(sentences)) < len(sentences) or len(set(opinions)) < len(opinions)


def gold_score(text: str, finished: bool = True) -> float:
    """The true quality of a review, our own:  sentiment − 1·(ungrammatical) − 0.5·(repetitive), in (−2.5, 1).

    The training never sees it: the reward model learns an imperfect copy of it from noisy comparisons.
    """
    return sentiment(text) - 1.0 * (not is_grammatical(text, finished)) - 0.5 * repetition(text)


def judge(prompts: list[str], responses: list[str], finished: list[bool]) -> dict[str, list[float]]:
    """What a trainer logs beside the reward, for each text = prompt + response: a judge of our own.

    Returns four columns: gold, and 0 or 1 for positive (sentiment above 0), grammatical and repetitive.
    Raises ValueError for lists of unequal lengths.
    """
    if not len(prompts) == len(responses) == len(finished):
        lengths = f"prompts {len(prompts)}, responses {len(responses)}, finished {len(finished)}"
        raise ValueError(f"lists must be equally long, got {lengths}")
    texts = [f"{prompt} {response}".strip() for prompt, response in zip(prompts, responses, strict=True)]
    ends = list(zip(texts, finished, strict=True))
    return {
        "gold": [gold_score(text, end) for text, end in ends],
        "positive": [float(sentiment(text) > 0) for text in texts],
        "grammatical": [float(is_grammatical(text, end)) for text, end in ends],
        "repetitive": [float(repetition(text)) for text in texts],
    }
