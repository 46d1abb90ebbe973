"""The grammar, the tokenizer and the gold score of the reviews, on sentences worked out by hand."""

import math
import random
from itertools import product

import pytest

from ppo_lab.files import data_path
from ppo_lab.llm.reviews import (
    VALENCE,
    gold_score,
    is_grammatical,
    judge,
    make_reviews,
    make_tokenizer,
    prompts,
    repetition,
    sentiment,
    vocabulary,
)

# wonderful 3, terrible -3, good 2, dull -2, loved 3, happy 3, fine 1, recommend 2
SENTIMENT = {
    "the plot was wonderful .": 3 / math.sqrt(24),
    "the plot was terrible .": -3 / math.sqrt(24),
    "the plot was not terrible .": 1.5 / math.sqrt(17.25),
    "the plot was not very good .": -1 / 4,
    "the plot was good and the cast was dull .": 0.0,
    "i loved the soup . this fine meal made me happy .": 7 / 8,
    "i would not recommend this book .": -1 / 4,
    "yesterday i saw this film": 0.0,
}
GRAMMATICAL = (
    "the plot was wonderful .",
    "the prose of this novel was not so odd .",
    "the soup was fine while the bread was not stale .",
    "last week i ate this dish and it was quite poor . i would avoid this meal .",
    "my wife and i rented the comedy last night . for my aunt the film was good .",
    "once my uncle did not like the memoir .",
    "this clumsy western made everyone yawn .",
)
UNGRAMMATICAL = (
    "",
    ".",
    "the plot was wonderful",
    "the plot was wonderful !",
    "the plot was . wonderful",
    "the plot wonderful was .",
    "the plot was wonderful wonderful .",
    "wonderful great the the superb i lovely",
    "the plot was wonderful .  i loved the cast .",
    "the plot was wonderful . i loved the soup .",
    "i watched this dinner",
    "i did not loved the plot .",
)


@pytest.fixture(scope="module")
def reviews():
    return make_reviews(2000, seed=3)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


# The gold score


@pytest.mark.parametrize("text", SENTIMENT)
def test_sentiment_by_hand(text):
    assert sentiment(text) == pytest.approx(SENTIMENT[text], abs=1e-12)


def test_not_reaches_the_next_opinion_of_its_sentence_only():
    assert sentiment("not the plot . good") == sentiment("good")
    assert sentiment("not good good") == pytest.approx(1 / 4)


def test_gold_is_sentiment_less_one_for_grammar_and_half_for_repetition():
    praise = 3 / math.sqrt(24)
    assert gold_score("the plot was wonderful .") == pytest.approx(praise)
    assert gold_score("the plot was wonderful") == pytest.approx(praise - 1)
    assert gold_score("the plot was wonderful .", finished=False) == pytest.approx(praise - 1)
    twice = "the plot was wonderful . the plot was wonderful ."
    assert gold_score(twice) == pytest.approx(6 / math.sqrt(51) - 0.5)
    assert gold_score("wonderful wonderful") == pytest.approx(6 / math.sqrt(51) - 1.5)


def test_repetition_means_a_sentence_or_an_opinion_word_twice():
    assert repetition("my aunt and i saw the film once . my aunt and i saw the film once .")
    assert repetition("the plot was good . i would praise this film . the cast was not good .")
    assert not repetition("the plot was good . the cast was great . i saw the film")


def test_the_judge_reads_prompt_and_response_together():
    columns = judge(
        ["the plot", "the plot was", "my aunt"],
        ["was good .", "dull . the cast was dull .", ""],
        [True, True, False],
    )
    assert columns["gold"] == pytest.approx([2 / math.sqrt(19), -4 / math.sqrt(31) - 0.5, -1.0])
    assert columns["positive"] == [1, 0, 0]
    assert columns["grammatical"] == [1, 1, 0]
    assert columns["repetitive"] == [0, 1, 0]


def test_the_judge_refuses_lists_of_unequal_lengths():
    with pytest.raises(ValueError, match="prompts 2, responses 1, finished 2"):
        judge(["a", "b"], ["c"], [True, True])


# The grammar


@pytest.mark.parametrize("text", GRAMMATICAL)
def test_the_grammar_accepts(text):
    assert is_grammatical(text)
    assert not is_grammatical(text, finished=False)


@pytest.mark.parametrize("text", UNGRAMMATICAL)
def test_the_grammar_refuses(text):
    assert not is_grammatical(text)


def test_every_generated_review_is_grammatical_and_repeats_nothing(reviews):
    assert all(is_grammatical(text) and not repetition(text) for text in reviews)


def test_shuffled_reviews_are_not_grammatical(reviews):
    rng = random.Random(0)
    accepted = 0
    for text in reviews:
        words = text.split()
        rng.shuffle(words)
        accepted += is_grammatical(" ".join(words))
    assert accepted <= 2


def test_reviews_have_8_to_24_tokens(reviews):
    assert {len(text.split()) for text in reviews} == set(range(8, 25))


def test_two_fifths_praise_two_fifths_blame_and_one_fifth_does_both(reviews):
    """With the negation counted: "not bad" praises."""
    kinds = {"praise": 0, "blame": 0, "mixed": 0}
    for text in reviews:
        signs = {sentiment(f"not {word}" if negated else word) > 0 for word, negated in opinions(text)}
        kinds["mixed" if len(signs) == 2 else "praise" if True in signs else "blame"] += 1
    assert kinds["praise"] / 2000 == pytest.approx(0.4, abs=0.035)
    assert kinds["blame"] / 2000 == pytest.approx(0.4, abs=0.035)
    assert kinds["mixed"] / 2000 == pytest.approx(0.2, abs=0.03)


def opinions(text):
    """The opinion words of a review, each with whether a "not" stands before it in its sentence."""
    for part in text.split("."):
        words = part.split()
        for position, word in enumerate(words):
            if word in VALENCE:
                yield word, "not" in words[max(0, position - 2) : position]


def test_one_seed_gives_one_corpus_and_more_reviews_come_at_its_end(reviews):
    assert make_reviews(50, seed=3) == reviews[:50]
    assert make_reviews(50, seed=4) != reviews[:50]


# The prompts


def test_prompts_are_different_neutral_and_2_to_5_words_long():
    texts = prompts(1152, seed=0)
    assert len(set(texts)) == 1152
    assert {len(text.split()) for text in texts} == {2, 3, 4, 5}
    assert not any(word in VALENCE or word in ("not", ".") for text in texts for word in text.split())


def test_prompts_repeat_with_their_seed():
    assert prompts(5, seed=1) == prompts(5, seed=1) != prompts(5, seed=2)


def test_more_prompts_than_there_are_is_refused():
    with pytest.raises(ValueError, match="n must lie between 0 and"):
        prompts(10**6, seed=0)


def sentences(things, parts, tried):
    """A sentence of each neutral beginning, for a thing of a domain, with a gap for the opinion."""
    for thing, part in product(things, parts):
        yield f"the {part} was {{}} ."
        yield f"the {part} of this {thing} was {{}} ."
        yield f"once i {tried} this {thing} and it was {{}} ."
        yield f"for my aunt the {thing} was {{}} ."
        yield f"my aunt and i {tried} the {thing} once . the {part} was {{}} ."
        yield f"we {tried} the {thing} for its {{}} {part} ."
        yield f"i would recommend this {thing} ."
        yield f"i would avoid this {thing} ."
        yield f"once my aunt loved the {thing} ."
        yield f"once my aunt hated the {thing} ."


def test_every_prompt_can_go_on_to_praise_to_blame_and_to_both():
    """Endings are what remains of whole sentences after their first words; one of them has to fit."""
    endings = {"praise": set(), "blame": set()}
    domains = [(["film"], ["plot"], "saw"), (["meal"], ["soup"], "ate"), (["book"], ["prose"], "read")]
    for domain in domains:
        for gapped in sentences(*domain):
            for word in ("good", "dull"):
                words = gapped.format(word).split()
                kind = "praise" if sentiment(" ".join(words)) > 0 else "blame"
                endings[kind] |= {" ".join(words[start:]) for start in range(1, 6)}
    other = {"praise": "i hated the {} .", "blame": "i loved the {} ."}
    for prompt in prompts(300, seed=5):
        for kind, tails in endings.items():
            fitting = [tail for tail in tails if is_grammatical(f"{prompt} {tail}")]
            assert fitting, (prompt, kind)
            both = (f"{prompt} {fitting[0]} {other[kind].format(part)}" for part in ("plot", "soup", "prose"))
            assert any(is_grammatical(text) for text in both), prompt


# The tokenizer


def test_the_vocabulary_starts_with_four_different_special_tokens(tokenizer):
    assert vocabulary()[:4] == ["<pad>", "<bos>", "<eos>", "<unk>"]
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id] == [
        0,
        1,
        2,
        3,
    ]
    assert 140 <= len(vocabulary()) == len(set(vocabulary())) == len(tokenizer) <= 160


def test_every_review_survives_the_round_trip(tokenizer, reviews):
    ids = tokenizer(reviews)["input_ids"]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == reviews
    assert all(row[0] == 1 and 3 not in row for row in ids)


def test_text_is_one_id_a_word_after_bos_and_padded_on_the_left(tokenizer):
    words = vocabulary()
    batch = tokenizer(["the plot", "the plot was good . <eos>"], padding=True)
    assert batch["input_ids"][0] == [0, 0, 0, 0, 1, words.index("the"), words.index("plot")]
    assert batch["attention_mask"][0] == [0, 0, 0, 0, 1, 1, 1]
    assert batch["input_ids"][1][-2:] == [words.index("."), 2]


def test_an_unknown_word_is_unk(tokenizer):
    assert tokenizer("the banana")["input_ids"][2] == 3


# The stored files


def test_the_stored_corpus_is_what_the_grammar_makes():
    lines = data_path("reviews/reviews.txt").read_text(encoding="utf-8").splitlines()
    assert lines == make_reviews(len(lines), seed=0)
    assert len(lines) == 3000


def test_the_stored_prompts_are_what_the_grammar_makes():
    names = ("reviews/prompts.txt", "reviews/prompts_held_out.txt")
    train, held_out = (data_path(name).read_text(encoding="utf-8").splitlines() for name in names)
    assert (len(train), len(held_out)) == (1024, 128)
    assert train + held_out == prompts(1152, seed=0)
