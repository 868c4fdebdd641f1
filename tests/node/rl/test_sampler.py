"""The built-in sampler: log-probs against a plain forward pass, frequencies against the distribution, and every end."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shoal.node.rl.config import LoraConfig
from shoal.node.rl.decode import runs_lean
from shoal.node.rl.draw import Sampling, log_distribution
from shoal.node.rl.models import add_lora
from shoal.node.rl.rollout import BuiltInSampler, _contains_stop, _stop_tail, sample
from shoal.node.rl.tiny import build_tokenizer

from .shapes import CONFIGS, CONTEXT, build

PROMPTS = [[20, 21, 22], [30], [40, 41, 42, 43, 44]]
SAMPLINGS = {
    "plain": Sampling(),
    "temperature": Sampling(temperature=0.6),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_p=0.7, temperature=1.3),
    "min_p": Sampling(min_p=0.2, temperature=1.5),
    "all": Sampling(temperature=1.2, top_k=20, top_p=0.9, min_p=0.05),
}
DRAWS = 20_000


@pytest.fixture(scope="module")
def models():
    return {shape: build(shape) for shape in CONFIGS}


def rollouts_of(model, prompts=PROMPTS, **changes):
    options = {
        "num_generations": 5, "max_new_tokens": 8, "sampling": Sampling(), "eos_ids": [1], "pad_id": 0,
        "generator": torch.Generator().manual_seed(5),
    } | changes  # fmt: skip
    return sample(model, prompts, **options)


def plain_logps(model, prompt, completion, sampling):
    """log-prob of each completion token, by one forward pass over the unpadded row, without a cache."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return reference_distribution(logits, sampling)[range(len(completion)), completion]


def reference_distribution(logits, sampling):
    """Row by row, in the plainest way: sort, walk, cut."""
    rows = []
    for row in logits / sampling.temperature:
        kept = row.argsort(descending=True).tolist()
        kept = kept[: sampling.top_k] if sampling.top_k else kept
        probs = row[kept].softmax(-1).tolist()
        nucleus, mass = [], 0.0
        for token, p in zip(kept, probs, strict=True):
            if mass >= sampling.top_p:
                break
            nucleus.append((token, p))
            mass += p
        best = nucleus[0][1]
        cut = torch.full_like(row, -torch.inf)
        kept = [token for token, p in nucleus if p >= sampling.min_p * best]
        cut[kept] = row[kept]
        rows.append(cut.log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("shape", CONFIGS)
def test_logps_equal_a_plain_forward_pass(models, shape, sampling):
    found = rollouts_of(models[shape], sampling=sampling, eos_ids=[1, *range(60, 80)])
    assert len(set(found.batch.completion_lengths.tolist())) > 1  # rows leave the batch at different times
    for row, completion in enumerate(found.completions()):
        expected = plain_logps(models[shape], PROMPTS[row // 5], completion, sampling)
        assert found.sampler_logps[row, : len(completion)].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
        assert torch.all(found.sampler_logps[row, len(completion) :] == 0)


@pytest.mark.parametrize("copy_bytes", [0, 4000, 1 << 24], ids=["no copies", "some copies", "all copies"])
@pytest.mark.parametrize("shape", CONFIGS)
def test_copies_of_weights_hold_the_adapters_and_change_no_log_prob(shape, copy_bytes):
    config = LoraConfig(r=4, target_modules="all-linear")
    model = add_lora(build(shape), config, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = rollouts_of(model, max_new_tokens=24, eos_ids=[1, *range(60, 70)], copy_bytes=copy_bytes)
    for row, completion in enumerate(found.completions()):
        expected = plain_logps(model, PROMPTS[row // 5], completion, Sampling())
        assert found.sampler_logps[row, : len(completion)].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_llama_decodes_the_lean_way(models):
    assert {shape: runs_lean(model) for shape, model in models.items()} == {
        "llama": True, "qwen3": True, "gpt2": False, "qwen3_moe": True,
    }  # fmt: skip


@pytest.mark.slow
def test_logps_equal_a_plain_forward_pass_on_a_real_model(real_model):
    sampler = BuiltInSampler(real_model, copy_bytes=1 << 30)
    prompts = [real_model.tokenizer(t).input_ids for t in ("The capital of France is", "1, 2, 3,", "Once upon a time")]
    for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.9, top_k=50)):
        found = sampler.sample(
            prompts, num_generations=3, max_new_tokens=16, sampling=sampling, generator=torch.Generator().manual_seed(0)
        )
        for row, completion in enumerate(found.completions()):
            expected = plain_logps(real_model.model, prompts[row // 3], completion, sampling)
            assert found.sampler_logps[row, : len(completion)].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def chi_square_p(tokens, probs):
    """p-value of drawn tokens under probs [vocabulary]; tokens expected under five times share one cell."""
    counts = np.bincount(tokens, minlength=len(probs)).astype(float)
    expected = probs / probs.sum() * len(tokens)
    assert counts[expected == 0].sum() == 0  # what is cut off is never drawn
    rare = expected < 5
    if expected[rare].sum() >= 5:
        counts, expected = (
            np.append(counts[~rare], counts[rare].sum()),
            np.append(expected[~rare], expected[rare].sum()),
        )
    else:
        largest = expected.argmax()
        counts[largest] += counts[rare].sum()
        expected[largest] += expected[rare].sum()
        counts, expected = counts[~rare], expected[~rare]
    assert len(counts) > 1
    return stats.chisquare(counts, expected).pvalue


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("shape", CONFIGS)
def test_frequencies_match_the_distribution(models, shape, sampling):
    """20,000 first tokens against a plain forward pass, and the second tokens after the most frequent first one."""
    model, prompt = models[shape], PROMPTS[2]
    found = rollouts_of(
        model, [prompt], num_generations=DRAWS, max_new_tokens=2, sampling=sampling, eos_ids=[],
        generator=torch.Generator().manual_seed(11),
    )  # fmt: skip
    drawn = found.batch.completion_ids.numpy()

    def expected(ids):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1:].double()
        return reference_distribution(logits, sampling).exp()[0].numpy()

    assert chi_square_p(drawn[:, 0], expected(prompt)) > 1e-3
    most = int(np.bincount(drawn[:, 0]).argmax())
    second = drawn[drawn[:, 0] == most, 1]
    assert chi_square_p(second, expected([*prompt, most])) > 1e-3


def test_the_frequency_test_can_fail(models):
    """Draws at another temperature are told apart, so that the test above means something."""
    found = rollouts_of(
        models["llama"], [PROMPTS[2]], num_generations=DRAWS, max_new_tokens=1, sampling=Sampling(temperature=1.05),
        eos_ids=[], generator=torch.Generator().manual_seed(11),
    )  # fmt: skip
    with torch.no_grad():
        logits = models["llama"](input_ids=torch.tensor([PROMPTS[2]])).logits[0, -1:].double()
    assert chi_square_p(found.batch.completion_ids[:, 0].numpy(), logits.softmax(-1)[0].numpy()) < 1e-3


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
)
def test_any_mixture_of_cuts_is_a_distribution_over_the_likeliest(seed, temperature, top_k, top_p, min_p):
    logits = 3 * torch.randn((4, 10), generator=torch.Generator().manual_seed(seed))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = log_distribution(logits, sampling)
    assert torch.allclose(found.exp().sum(-1), torch.ones(4), atol=1e-5)
    for row, given_logits in zip(found, logits, strict=True):
        kept = row > -torch.inf
        assert kept[given_logits.argmax()]
        assert kept.sum() <= (top_k or 10)
        assert given_logits[kept].min() >= given_logits[~kept].max() if (~kept).any() else True


def test_several_end_tokens_end_a_completion(models):
    ends = [1, *range(40, 101)]
    found = rollouts_of(models["qwen3"], eos_ids=ends, max_new_tokens=20)
    for row, ids in enumerate(found.completions()):
        assert (ids[-1] in ends) == (not found.truncated[row])
        assert not set(ids[:-1]) & set(ends)
    assert {int(i[-1]) for i in found.completions()} - {1}


@pytest.mark.parametrize("shape", CONFIGS)
def test_the_context_limits_a_completion(models, shape):
    """A long and a short prompt in one batch: each gets what its own context leaves, and no row runs past the end."""
    long = [5 + i % 90 for i in range(CONTEXT - 3)]
    found = rollouts_of(models[shape], [long, [7]], max_new_tokens=10, eos_ids=[])
    assert found.batch.completion_lengths.tolist() == [3] * 5 + [10] * 5
    assert found.truncated.all()
    for row in (0, 5):
        completion = found.completions()[row]
        expected = plain_logps(models[shape], [long, [7]][row // 5], completion, Sampling())
        assert found.sampler_logps[row, : len(completion)].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_prompt_that_fills_the_context_is_refused(models):
    with pytest.raises(ValueError, match="64 tokens leaves no room in the model's context of 64"):
        rollouts_of(models["llama"], [[5] * CONTEXT])


class TestStopStrings:
    """With the built-in tokenizer, one token a character."""

    TOKENIZER = build_tokenizer()

    def drawn(self, model, stop_strings, **changes):
        options = {"max_new_tokens": 30, "num_generations": 40, "eos_ids": [1]} | changes
        return rollouts_of(model, sampling=Sampling(stop_strings=stop_strings), tokenizer=self.TOKENIZER, **options)

    def test_a_completion_ends_with_the_stop_string(self, models):
        free = self.drawn(models["llama"], ())
        texts = self.TOKENIZER.batch_decode(free.completions())
        pair = texts[0][3:5]  # something that this model does write
        stopped = self.drawn(models["llama"], (pair, "never written"))
        ended = 0
        for row, ids in enumerate(stopped.completions()):
            text = self.TOKENIZER.decode(ids)
            assert pair not in text[:-1]
            if text.endswith(pair):
                ended += 1
                assert not stopped.truncated[row]
            else:
                assert ids[-1] == 1 or (len(ids) == 30 and stopped.truncated[row])
        assert ended > 0

    def test_log_probs_stay_those_of_the_distribution(self, models):
        stopped = self.drawn(models["gpt2"], tuple("abcdef"))
        for row, ids in enumerate(stopped.completions()):
            expected = plain_logps(models["gpt2"], PROMPTS[row // 40], ids, Sampling())
            assert stopped.sampler_logps[row, : len(ids)].tolist() == pytest.approx(expected.tolist(), abs=1e-4)

    def test_they_need_a_tokenizer(self, models):
        with pytest.raises(ValueError, match="tokenizer"):
            rollouts_of(models["llama"], sampling=Sampling(stop_strings=("x",)))

    def test_they_may_span_several_tokens_of_many_bytes(self):
        """A stop string is found although its characters are cut across tokens and the text in front is a torn one."""
        tail = _stop_tail(("€</a>",))
        assert tail >= len("€</a>".encode())

        class Bytes:
            def batch_decode(self, rows, **_):
                return [bytes(r).decode("utf-8", "replace") for r in rows]

        text = "ü€</a>".encode()[1:]  # begins in the middle of a character
        rows = torch.tensor([list(text), list(text[:-1] + b"x")])
        assert _contains_stop(rows, Sampling(stop_strings=("€</a>",)), Bytes()).tolist() == [True, False]


def test_equal_seeds_give_equal_samples_and_other_seeds_do_not(models):
    def ids(seed):
        return rollouts_of(models["qwen3"], generator=torch.Generator().manual_seed(seed)).batch.completion_ids.tolist()

    assert ids(1) == ids(1) != ids(2)


def test_the_built_in_sampler_hands_its_settings_on(tiny):
    found = BuiltInSampler(tiny).sample(
        PROMPTS, num_generations=2, max_new_tokens=4, sampling=Sampling(stop_strings=tuple("0123456789")),
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert found.from_trainer and BuiltInSampler(tiny).is_trainer
    assert len(found.completions()) == 6
    assert all(len(ids) <= 4 for ids in found.completions())
