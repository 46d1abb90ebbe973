"""Sampling against a loop over one prompt at a time, without padding, without cache."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ppo_lab.llm.generate import generate, keyed_uniforms, sample
from ppo_lab.llm.models import Actor
from ppo_lab.llm.tokens import left_pad, token_logp

INF = math.inf
N_WORDS, EOS = 12, 1
PROMPTS = [[5, 6], [2, 3, 4, 5, 6], [7], [3, 3, 8], [9, 2, 4, 4], [10], [11, 5, 2], [6, 6]]
SETTINGS = {"max_new_tokens": 10, "eos_token_ids": EOS}


def make_llama():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=N_WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.4,
        attention_dropout=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


def make_gpt2():
    """With learned positions: a position that is one off reads another row of the table."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=N_WORDS,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        initializer_range=0.4,
        attn_pdrop=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module", params=[make_llama, make_gpt2], ids=["llama", "gpt2"])
def lm(request):
    return request.param()


@pytest.fixture
def batch():
    return left_pad(PROMPTS, EOS)


@pytest.fixture
def uniforms():
    return keyed_uniforms(0, 0, range(len(PROMPTS)), 10)


@torch.no_grad()
def slow_answer(lm, prompt, uniforms, max_new_tokens, eos, temperature):
    """y_t = the first token whose cumulative probability exceeds u_t, until an EOS; ids and log-probabilities."""
    ids, logp = list(prompt), []
    for u in uniforms[:max_new_tokens].tolist():
        probs = (lm(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1).tolist()
        cumulative, token = probs[0], 0
        while cumulative <= u:
            token += 1
            cumulative += probs[token]
        ids.append(token)
        logp.append(math.log(probs[token]))
        if token == eos:
            break
    return ids[len(prompt) :], logp


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_each_answer_is_that_of_a_slow_loop_over_its_prompt_alone(lm, batch, uniforms, temperature):
    ids, mask, logp = generate(lm, *batch, uniforms=uniforms, temperature=temperature, **SETTINGS)
    lengths = mask.sum(-1).tolist()
    # Some answers end at once, some never: the batch shrinks on the way.
    assert min(lengths) < 4 and max(lengths) == 10
    for n, prompt in enumerate(PROMPTS):
        expected_ids, expected_logp = slow_answer(lm, prompt, uniforms[n], 10, EOS, temperature)
        assert ids[n, mask[n]].tolist() == expected_ids
        assert mask[n].tolist() == [t < len(expected_ids) for t in range(10)]
        assert logp[n, mask[n]].tolist() == pytest.approx(expected_logp, abs=1e-5)
    assert (ids[~mask] == EOS).all() and (logp[~mask] == 0).all()


def test_the_longest_answer_gives_the_width(lm, batch, uniforms):
    whole = generate(lm, *batch, uniforms=uniforms, **SETTINGS)
    short = whole.mask.sum(-1).argsort()[:2]
    part = generate(lm, *left_pad([PROMPTS[n] for n in short], EOS), uniforms=uniforms[short], **SETTINGS)
    assert part.ids.shape[1] == whole.mask[short].sum(-1).max() < 10


def test_an_answer_does_not_depend_on_its_place_or_its_neighbours(lm, batch, uniforms):
    whole = generate(lm, *batch, uniforms=uniforms, **SETTINGS)
    for rows in ([7, 0, 3, 5, 1, 2, 6, 4], [4], [2, 5]):
        ids, mask, logp = generate(
            lm, *left_pad([PROMPTS[n] for n in rows], 0), uniforms=keyed_uniforms(0, 0, rows, 10), **SETTINGS
        )
        width = ids.shape[1]
        assert ids.equal(whole.ids[rows, :width]) and mask.equal(whole.mask[rows, :width])
        assert (logp - whole.logp[rows, :width]).abs().max() < 1e-5


def test_without_uniforms_it_is_the_greedy_search_of_transformers(lm, batch):
    ids, mask, _ = generate(lm, *batch, uniforms=None, **SETTINGS)
    theirs = lm.generate(
        input_ids=batch[0],
        attention_mask=batch[1].long(),
        do_sample=False,
        max_new_tokens=10,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )[:, batch[0].shape[1] :]
    assert ids.equal(theirs)
    ended = (ids == EOS).any(-1)
    assert mask.sum(-1).tolist() == [
        row.tolist().index(EOS) + 1 if e else 10 for row, e in zip(ids, ended, strict=True)
    ]


def test_finished_rows_leave_the_batch(lm, batch, uniforms):
    sizes = []
    hook = lm.register_forward_pre_hook(lambda _, __, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True)
    try:
        mask = generate(lm, *batch, uniforms=uniforms, **SETTINGS).mask
    finally:
        hook.remove()
    assert sizes == mask.sum(0).tolist()
    assert sizes[-1] < sizes[0] == len(PROMPTS)


@pytest.mark.parametrize("n_pads", [0, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_B21_the_sampler_agrees_with_the_forward_pass_of_training(lm, uniforms, n_pads, temperature):
    """For any padding and any batch size; in bfloat16 the two only come near each other."""
    wide = [[EOS] * (5 + n_pads), *PROMPTS]
    prompt_ids, prompt_mask = (x[1:] for x in left_pad(wide, EOS))
    actor = Actor(lm)
    for bf16, tolerance in ((False, 1e-5), (True, 0.1)):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            ids, mask, logp = generate(
                lm, prompt_ids, prompt_mask, uniforms=uniforms, temperature=temperature, **SETTINGS
            )
            for rows in torch.arange(len(PROMPTS)).split(8) + torch.arange(len(PROMPTS)).split(3):
                real = torch.cat([prompt_mask, mask], 1)[rows]
                logits, _ = actor(torch.cat([prompt_ids, ids], 1)[rows], real, ids.shape[1])
                again = token_logp(logits, ids[rows], temperature=temperature)
                assert (again - logp[rows])[mask[rows]].abs().max() < tolerance


def test_B25_an_answer_at_the_limit_keeps_the_tokens_that_were_sampled(lm, batch, uniforms):
    # Id 99 is no word: nothing ends.
    settings = {"eos_token_ids": 99}
    long = generate(lm, *batch, uniforms=uniforms, max_new_tokens=10, **settings)
    short = generate(lm, *batch, uniforms=uniforms[:, :4], max_new_tokens=4, **settings)
    assert short.mask.all() and long.mask.all()
    assert short.ids.equal(long.ids[:, :4])
    # A stop token ends like an EOS.
    stop = int(long.ids[0, 1])
    stopped = generate(lm, *batch, uniforms=uniforms, max_new_tokens=10, eos_token_ids=[99, stop])
    ends = [row.index(stop) + 1 if stop in row else 10 for row in long.ids.tolist()]
    assert stopped.mask.sum(-1).tolist() == ends
    assert stopped.ids[stopped.mask].equal(long.ids[:, : stopped.ids.shape[1]][stopped.mask])


def test_B27_answers_that_end_at_once_are_one_token_long(lm, batch, uniforms):
    ids, mask, logp = generate(lm, *batch, uniforms=uniforms, max_new_tokens=10, eos_token_ids=range(N_WORDS))
    assert mask.tolist() == [[True]] * len(PROMPTS)
    assert ids.shape == logp.shape == (len(PROMPTS), 1)
    assert (logp < 0).all()


def test_one_new_token(lm, batch, uniforms):
    ids, mask, _ = generate(lm, *batch, uniforms=uniforms[:, :1], max_new_tokens=1, eos_token_ids=EOS)
    assert ids.shape == (len(PROMPTS), 1) and mask.all()


@pytest.mark.parametrize("training", [True, False])
def test_the_model_keeps_its_mode_and_samples_without_dropout(lm, batch, uniforms, training):
    lm.eval()
    expected = generate(lm, *batch, uniforms=uniforms, **SETTINGS)
    lm.train(training)
    try:
        ids, _, logp = generate(lm, *batch, uniforms=uniforms, **SETTINGS)
        assert lm.training is training
        assert ids.equal(expected.ids) and logp.equal(expected.logp)
        with pytest.raises(IndexError):
            generate(lm, batch[0] + N_WORDS, batch[1], uniforms=uniforms, **SETTINGS)
        assert lm.training is training
    finally:
        lm.eval()


def test_generation_builds_no_graph(lm, batch, uniforms):
    assert not generate(lm, *batch, uniforms=uniforms, **SETTINGS).logp.requires_grad


def test_generate_refuses_what_does_not_fit(lm, batch, uniforms):
    ids, mask = batch

    def refused(match, *tensors, **changes):
        with pytest.raises(ValueError, match=match):
            generate(lm, *tensors, **{"uniforms": uniforms, **SETTINGS, **changes})

    refused("prompt_ids and prompt_mask", ids, mask[:, 1:])
    refused("prompt_ids and prompt_mask", ids[0], mask[0])
    refused("prompt_ids and prompt_mask", ids[:0], mask[:0])
    refused("padded on the left", ids, mask.flip(1))
    refused("max_new_tokens must be at least 1", ids, mask, max_new_tokens=0)
    refused("temperature must be positive", ids, mask, temperature=0.0)
    refused(r"uniforms must have the shape \(8, 10\), got \(8, 9\)", ids, mask, uniforms=uniforms[:, :9])
    refused("uniforms", ids, mask, uniforms=uniforms[:7])


# --- one token


def test_sample_takes_the_first_token_whose_cumulative_probability_exceeds_u():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    uniforms = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 0.87, 0.88, 0.999], dtype=torch.float64)
    ids, logp = sample(logits.expand(8, 4), uniforms)
    assert ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert logp.exp().tolist() == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125])
    assert sample(logits.roll(2).expand(2, 4), None)[0].tolist() == [2, 2]


def test_frequencies_are_the_probabilities():
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    n = 20_000
    ids, _ = sample(probs.log().expand(n, 6), keyed_uniforms(0, 0, range(n), 1)[:, 0])
    counts = torch.bincount(ids, minlength=6)
    # Σ (count − n·p)²/(n·p) has mean 5 and exceeds 20.5 once in a thousand times.
    assert ((counts - n * probs).square() / (n * probs)).sum() < 20.5


def test_a_token_of_probability_0_is_never_drawn():
    logits = torch.full((1, 50_000), -INF)
    possible = [3, 17, 20_000, 49_990]
    logits[0, possible] = 0.0
    at_the_edges = [0.0, 1e-300, 0.25, 0.5, 0.75, 1 - 2**-53]
    uniforms = torch.tensor(at_the_edges + torch.linspace(0, 0.999, 50).tolist(), dtype=torch.float64)
    ids, logp = sample(logits.expand(len(uniforms), -1), uniforms)
    assert set(ids.tolist()) == set(possible)
    assert ids[0] == 3 and ids[5] == 49_990
    assert logp.tolist() == pytest.approx([math.log(0.25)] * len(uniforms))


def test_the_last_words_of_a_large_vocabulary_are_reached():
    # A hundred thousand equal words: float32 sums would be off by tens of them.
    n = 100_000
    logits = torch.zeros(1, n)
    wanted = torch.tensor([0, 1, 50_000, 99_998, 99_999])
    ids, _ = sample(logits.expand(5, n), (wanted + 0.5).double() / n)
    assert ids.tolist() == wanted.tolist()


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16)
    ids, logp = sample(logits, torch.tensor([0.9995], dtype=torch.float64))
    assert ids.item() == 999
    assert logp.dtype == torch.float32
    assert logp.item() == pytest.approx(-math.log(1000), abs=1e-5)


# --- the random numbers


def literal_uniform(seed, iteration, row, position):
    """SplitMix64's mixing function over the four numbers, in Python integers."""

    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    # The first output of the published generator from seed 0.
    assert mix(0) == 0xE220A8397B1DCDAF
    return (mix(mix(mix(mix(mix(seed) ^ iteration) ^ row) ^ position)) >> 11) / 2**53


def test_keyed_uniforms_are_a_function_of_four_numbers():
    ours = keyed_uniforms(7, 3, [0, 5, 2], 4)
    assert ours.tolist() == [[literal_uniform(7, 3, row, t) for t in range(4)] for row in (0, 5, 2)]
    # The rows of another batch, more tokens: the same numbers.
    assert keyed_uniforms(7, 3, range(6), 9)[[0, 5, 2], :4].equal(ours)
    assert ours.dtype == torch.float64


def test_keyed_uniforms_are_uniform():
    drawn = keyed_uniforms(0, 0, range(1000), 100)
    assert drawn.min() >= 0 and drawn.max() < 1
    # Standard errors: 0.29/√n and 0.3/4/√n for n = 100,000 numbers.
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.004)
    assert drawn.var().item() == pytest.approx(1 / 12, abs=0.001)
    counts = torch.histc(drawn.float(), bins=20, min=0, max=1)
    assert ((counts - 5000).square() / 5000).sum() < 43.8  # 19 degrees of freedom, once in a thousand times
    # Neighbours in a row and in a column have nothing to do with each other.
    centred = drawn - 0.5
    for product in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(product.mean().item()) < 4 / 12 / math.sqrt(product.numel())


def test_no_number_comes_twice():
    drawn = [keyed_uniforms(seed, iteration, range(50), 20) for seed in range(5) for iteration in (0, 1, 2, 2**40)]
    assert torch.stack(drawn).unique().numel() == 20 * 50 * 20


def test_a_damaged_model_is_named_before_an_index_error():
    with pytest.raises(FloatingPointError, match="weights are damaged"):
        sample(torch.tensor([[0.0, 0.0], [math.nan, 0.0]]), torch.tensor([0.5, 0.5]))
