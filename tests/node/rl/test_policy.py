"""Log-probs: independent of padding and of how rows are batched; the sampler reports what it drew from."""

import pytest
import torch

from shoal.node.rl.policy import completion_logps, forward_logits, positions
from shoal.node.rl.rollout import Sampling, pairs, sample

PROMPTS = [[20, 21, 22], [30], [40, 41, 42, 43, 44]]
ANSWERS = [[50, 1], [51, 52, 53, 1], [54, 55, 1]]


def batch_of(tiny, rows):
    return pairs([PROMPTS[i] for i in rows], [ANSWERS[i] for i in rows], pad_id=tiny.pad_id, device=tiny.device)


def test_padding_changes_nothing(tiny):
    together = completion_logps(tiny.model, batch_of(tiny, [0, 1, 2]))
    for i in range(3):
        alone = completion_logps(tiny.model, batch_of(tiny, [i]))[0]
        assert torch.allclose(together[i, : len(alone)], alone, atol=1e-5)


def test_logps_agree_with_a_plain_forward_pass(tiny):
    row = PROMPTS[0] + ANSWERS[0]
    logits = tiny.model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
    expected = [logits[len(PROMPTS[0]) - 1 + i, token].item() for i, token in enumerate(ANSWERS[0])]
    found = completion_logps(tiny.model, batch_of(tiny, [0]))[0]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_rows_trims_padding_and_keeps_values(tiny):
    batch = batch_of(tiny, [0, 1, 2])
    part = batch.rows(torch.tensor([1]))
    assert part.prompt_ids.shape == (1, 1)
    whole = completion_logps(tiny.model, batch)[1]
    assert torch.allclose(completion_logps(tiny.model, part)[0], whole[:4], atol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.6), Sampling(top_k=5), Sampling(top_p=0.7, temperature=1.3)],
    ids=["plain", "temperature", "top_k", "top_p"],
)
def test_sampler_reports_the_distribution_it_drew_from(tiny, sampling):
    with torch.no_grad():
        tiny.model.model.embed_tokens.weight.mul_(8)  # a peaked distribution, so that top-p cuts something
    rollouts = sample(
        tiny.model, PROMPTS, num_generations=5, max_new_tokens=6, sampling=sampling, eos_ids=[1, *range(60, 70)],
        pad_id=0, generator=torch.Generator().manual_seed(5),
    )  # fmt: skip
    batch = rollouts.batch
    for row in range(15):
        length = int(batch.completion_lengths[row])
        ids = torch.cat(
            [torch.tensor(PROMPTS[row // 5]), batch.completion_ids[row, :length]]
        )  # recomputed without padding, cache or batching
        logits = tiny.model(input_ids=ids.unsqueeze(0)).logits[0, -length - 1 : -1].float() / sampling.temperature
        expected = reference_logps(logits, sampling).gather(1, batch.completion_ids[row, :length, None]).squeeze(1)
        assert torch.allclose(rollouts.sampler_logps[row, :length], expected, atol=1e-4)
        assert torch.all(rollouts.sampler_logps[row, length:] == 0)


def reference_logps(logits, sampling):
    """Token by token, in the plainest way."""
    out = []
    for row in logits:
        order = row.argsort(descending=True).tolist()
        kept = order[: sampling.top_k] if sampling.top_k else order
        if sampling.top_p < 1:
            probs, mass, nucleus = row.softmax(-1), 0.0, []
            for token in kept:
                if mass >= sampling.top_p:
                    break
                nucleus.append(token)
                mass += probs[token].item()
            kept = nucleus
        cut = torch.full_like(row, -torch.inf)
        cut[kept] = row[kept]
        out.append(cut.log_softmax(-1))
    return torch.stack(out)


def test_cached_and_compacted_rows_keep_their_place(tiny):
    """Rows finish at different times; what remains must still belong to its own prompt."""
    rollouts = sample(
        tiny.model, PROMPTS, num_generations=8, max_new_tokens=12, sampling=Sampling(), eos_ids=list(range(1, 40)),
        pad_id=0, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    lengths = rollouts.batch.completion_lengths
    assert len(set(lengths.tolist())) > 3
    again = completion_logps(tiny.model, rollouts.batch)
    mask = rollouts.batch.completion_mask()
    assert torch.allclose(again[mask], rollouts.sampler_logps[mask], atol=1e-4)


def test_masks_come_from_lengths_when_pad_is_eos(tiny):
    rollouts = sample(
        tiny.model, PROMPTS, num_generations=6, max_new_tokens=8, sampling=Sampling(), eos_ids=[1, *range(50, 99)],
        pad_id=1, generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    mask = rollouts.batch.completion_mask()
    for row, ids in enumerate(rollouts.completions()):
        assert int(mask[row].sum()) == len(ids)
        if not rollouts.truncated[row]:
            assert ids[-1] == 1 or ids[-1] >= 50  # the closing token is trained on
        assert all(token != 1 and token < 50 for token in ids[:-1])
    again = completion_logps(tiny.model, rollouts.batch)
    assert torch.allclose(again[mask], rollouts.sampler_logps[mask], atol=1e-4)


def test_truncated_means_no_end_token(tiny):
    rollouts = sample(
        tiny.model, PROMPTS, num_generations=2, max_new_tokens=2, sampling=Sampling(), eos_ids=[2],
        pad_id=0, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    ended = torch.tensor([row[-1] == 2 for row in rollouts.completions()])
    assert torch.equal(rollouts.truncated, ~ended)


def test_sampling_follows_its_generator_alone(tiny):
    def draw(seed):
        return sample(
            tiny.model, PROMPTS, num_generations=3, max_new_tokens=5, sampling=Sampling(), eos_ids=[1], pad_id=0,
            generator=torch.Generator().manual_seed(seed),
        ).completions()  # fmt: skip

    first = draw(9)
    torch.manual_seed(123)
    assert draw(9) == first
    assert draw(10) != first


def test_greedy_takes_the_most_likely_token(tiny):
    rollouts = sample(
        tiny.model, PROMPTS, num_generations=1, max_new_tokens=1, sampling=Sampling(greedy=True), eos_ids=[1],
        pad_id=0, generator=torch.Generator(),
    )  # fmt: skip
    mask = torch.ones(1, 3, dtype=torch.bool)
    logits = forward_logits(
        tiny.model, input_ids=torch.tensor([PROMPTS[0]]), attention_mask=mask, position_ids=positions(mask), keep=1
    )
    assert rollouts.completions()[0] == [int(logits[0, -1].argmax())]


def test_empty_prompts_are_refused(tiny):
    with pytest.raises(ValueError, match="at least one token"):
        sample(
            tiny.model, [[]], num_generations=1, max_new_tokens=1, sampling=Sampling(), eos_ids=[1], pad_id=0,
            generator=torch.Generator(),
        )  # fmt: skip


def test_sharing_a_prompt_changes_neither_values_nor_gradients(tiny):
    rollouts = sample(
        tiny.model, PROMPTS, num_generations=4, max_new_tokens=6, sampling=Sampling(), eos_ids=list(range(1, 30)),
        pad_id=0, generator=torch.Generator().manual_seed(4),
    )  # fmt: skip
    batch = rollouts.batch
    separate = pairs(
        [PROMPTS[i // 4] for i in range(12)], rollouts.completions(), pad_id=tiny.pad_id, device=tiny.device
    )
    mask = batch.completion_mask()
    found = []
    for given in (batch, separate):
        tiny.model.zero_grad()
        logps = completion_logps(tiny.model, given)
        torch.where(mask, logps, torch.zeros(())).sum().backward()
        grads = torch.cat([p.grad.reshape(-1) for p in tiny.model.parameters()])
        found.append((logps[mask].detach(), grads))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-4)
