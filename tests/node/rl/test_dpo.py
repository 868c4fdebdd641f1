"""DPO: losses against TRL's, the reference without a second model, and that a policy comes to prefer what was chosen."""

import importlib.metadata
import importlib.util
import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from shoal.node.rl.config import LoraConfig, ModelConfig, TinyConfig
from shoal.node.rl.dpo import DpoConfig, _encode, _logps, encode_prompt, train_dpo
from shoal.node.rl.dpo_losses import (
    ANY_DIVERGENCE,
    SORTED,
    Divergence,
    DpoLoss,
    PairLogps,
    discount_tail,
    dpo_loss,
    pair_weights,
)
from shoal.node.rl.models import load_model
from shoal.node.rl.policy import completion_logps
from shoal.node.rl.preferences import Preference
from shoal.node.rl.rollout import pairs

LOSSES = get_args(DpoLoss)
# What changes a loss: (loss types, further options under TRL's names).
VARIANTS = (
    *(((name,), {}) for name in LOSSES),
    *(((name,), {"f_divergence_type": kind}) for name in sorted(ANY_DIVERGENCE) for kind in get_args(Divergence)[1:]),
    # TRL multiplies in place, which autograd refuses for "hinge" and "sft".
    *(((name,), {"use_weighting": True}) for name in LOSSES if name not in SORTED | {"hinge", "sft"}),
    *(((name,), {"ld_alpha": 0.3}) for name in LOSSES),
    (("sigmoid", "bco_pair", "sft"), {"loss_weights": (0.8, 0.2, 1.0)}),
    (("hinge", "aot"), {}),
    (("ipo", "sft"), {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.25, "ld_alpha": 0.5}),
    (("sigmoid",), {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0}),
    (
        ("robust", "exo_pair"),
        {"loss_weights": (0.5, 2.0), "use_weighting": True, "ld_alpha": 0.0, "f_divergence_type": "forward_kl"},
    ),
)


def variant_name(variant):
    types, options = variant
    return "+".join(types) + "".join(f"-{name}={value}" for name, value in options.items())


VERSION = importlib.metadata.version("trl") if importlib.util.find_spec("trl") else "none"
GOLDEN = Path(__file__).parents[2] / "data" / "dpo_losses.json"  # written by TRL 1.16.0: see `golden_rows`


def draw(seed):
    """Random pairs: log-probs per token of policy and reference, and options under TRL's names."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return low + (high - low) * float(torch.rand(1, generator=generator, dtype=torch.float64))

    n, width = 1 + int(uniform(0, 5)), 2 + int(uniform(0, 7))
    lengths = torch.randint(1, width, (2 * n,), generator=generator)
    mask = torch.arange(width - 1) < lengths.unsqueeze(1)  # of the tokens that are predicted
    policy = -3 * torch.rand(2 * n, width - 1, generator=generator, dtype=torch.float64)
    reference = policy + uniform(0, 1) * torch.randn(2 * n, width - 1, generator=generator, dtype=torch.float64)
    options = {
        "beta": [0.1, 0.5, 2.0][int(uniform(0, 3))],
        "label_smoothing": [0.1, 1e-3, 0.3][int(uniform(0, 3))],
        "discopop_tau": [0.05, 0.5][int(uniform(0, 2))],
    }
    squares = -2 * torch.rand(2 * n, width - 1, generator=generator, dtype=torch.float64)
    return SimpleNamespace(
        policy=policy * mask, reference=reference * mask, mask=mask, squares=squares * mask, options=options
    )


def our_loss(case, policy, types, options):
    options = dict(options)
    alpha, weighting = options.pop("ld_alpha", 1.0), options.pop("use_weighting", False)
    chosen_lengths, rejected_lengths = lengths = case.mask.sum(1).chunk(2)
    chosen, rejected = discount_tail(*policy.chunk(2), lengths, alpha)
    ref_chosen, ref_rejected = discount_tail(*case.reference.chunk(2), lengths, alpha)
    logps = PairLogps(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        chosen_whole=policy.sum(1).chunk(2)[0],
        weights=pair_weights(policy.chunk(2), case.squares.chunk(2), lengths) if weighting else None,
    )
    return dpo_loss(logps, loss_type=types, **case.options, **options).mean()


def trl_loss(case, policy, types, options):
    """As TRL's own code computes it, its model call replaced by the tensors of the case."""
    from trl import DPOTrainer

    class OneProcess:
        device = torch.device("cpu")

        def gather_for_metrics(self, tensor):
            return tensor

        gather = gather_for_metrics

    trainer = DPOTrainer.__new__(DPOTrainer)
    vars(trainer).update(
        accelerator=OneProcess(),
        args=SimpleNamespace(discopop_tau=case.options["discopop_tau"]),
        model=SimpleNamespace(training=True),
        beta=case.options["beta"],
        label_smoothing=case.options["label_smoothing"],
        loss_types=list(types),
        loss_weights=list(options.get("loss_weights") or [1.0] * len(types)),
        ld_alpha=options.get("ld_alpha"),
        f_divergence_type=options.get("f_divergence_type", "reverse_kl"),
        f_alpha_divergence_coef=options.get("f_alpha_divergence_coef", 0.5),
        precompute_ref_logps=True,
        use_weighting=options.get("use_weighting", False),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    rows, width = case.mask.shape
    whole = torch.cat([torch.zeros(rows, 1, dtype=torch.bool), case.mask], dim=1)  # one token of prompt
    alpha = options.get("ld_alpha")  # TRL applies it before it keeps the reference's sums: as its precomputation does
    ref_chosen, ref_rejected = discount_tail(
        *case.reference.chunk(2), case.mask.sum(1).chunk(2), 1.0 if alpha is None else alpha
    ).to(policy.dtype)
    zeros = torch.zeros(rows, width)

    def model(**kwargs):
        return SimpleNamespace(
            log_probs=policy,
            log_sum_sq_probs=case.squares.to(policy.dtype),
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
        )

    inputs = {
        "input_ids": torch.ones(rows, width + 1, dtype=torch.int64),
        "attention_mask": torch.ones(rows, width + 1, dtype=torch.int64),
        "completion_mask": whole.long(),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    return trainer._compute_loss(model, inputs, return_outputs=False)


def value_and_gradient(loss, case, types, options, dtype=torch.float64):
    policy = case.policy.clone().to(dtype).requires_grad_()
    value = loss(case, policy, types, options)
    value.backward()
    return float(value.detach()), torch.where(
        case.mask, policy.grad, 0.0
    ).double()  # at padding there is nothing to learn


def of_trl(case, types, options):
    """Loss, gradient and what they are exact to: TRL's alpha divergence knows no fp64."""
    single = options.get("f_divergence_type") == "alpha_divergence"
    value, gradient = value_and_gradient(trl_loss, case, types, options, torch.float32 if single else torch.float64)
    return value, gradient, 1e-4 * max(1.0, abs(value), float(gradient.abs().max())) if single else 1e-6


def golden_rows():
    """What tests/data/dpo_losses.json holds: TRL's loss, and the sum and the largest part of its gradient."""
    rows = []
    for seed in range(4):
        for types, options in VARIANTS:
            value, gradient, _ = of_trl(draw(seed), types, options)
            norms = float(gradient.sum()), float(gradient.abs().max())
            rows.append(
                {"seed": seed, "loss_type": types, "options": options, "loss": value, "gradient": norms},
            )
    return rows


@pytest.mark.parametrize(
    "row",
    json.loads(GOLDEN.read_text()),
    ids=lambda row: f"{variant_name((row['loss_type'], row['options']))}-{row['seed']}",
)
def test_losses_are_those_that_trl_gave(row):
    value, gradient = value_and_gradient(our_loss, draw(row["seed"]), row["loss_type"], row["options"])
    single = row["options"].get("f_divergence_type") == "alpha_divergence"  # TRL computes that one in fp32
    near = {"abs": 1e-5, "rel": 1e-5} if single else {"abs": 1e-6}
    assert value == pytest.approx(row["loss"], **near)
    assert (float(gradient.sum()), float(gradient.abs().max())) == pytest.approx(tuple(row["gradient"]), **near)


@pytest.mark.long
@pytest.mark.skipif(not VERSION.startswith("1.16"), reason=f"needs trl 1.16, found {VERSION}")
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_name)
def test_losses_and_gradients_equal_trls(variant):
    for seed in range(100):
        case = draw(seed)
        expected, gradient, near = of_trl(case, *variant)
        found, ours = value_and_gradient(our_loss, case, *variant)
        assert found == pytest.approx(expected, abs=near), seed
        assert ours.numpy() == pytest.approx(gradient.numpy(), abs=near), seed


def test_every_loss_starts_without_a_preference_and_falls_towards_the_chosen():
    """At the reference, more for what was chosen lowers every loss; so does less for what was rejected, where it counts."""
    zero = torch.zeros(1, dtype=torch.float64)
    for loss_type in LOSSES:
        chosen, rejected = zero.clone().requires_grad_(), zero.clone().requires_grad_()
        ones = torch.ones(1)
        logps = PairLogps(
            chosen=chosen,
            rejected=rejected,
            ref_chosen=zero,
            ref_rejected=zero,
            chosen_lengths=ones,
            rejected_lengths=ones,
        )
        loss = dpo_loss(logps, loss_type=loss_type, label_smoothing=0.01).mean()
        if loss_type in ("sigmoid", "robust", "sigmoid_norm"):
            assert float(loss.detach()) == pytest.approx(math.log(2))
        up, down = torch.autograd.grad(loss, (chosen, rejected), allow_unused=True)
        if loss_type == "apo_down":  # lowers both, the rejected further
            assert 0 <= up < down
        elif loss_type != "discopop":  # is not monotonic near 0
            assert up < 0 and (loss_type == "sft" or down > 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_type": "exo_pair"}, "label_smoothing"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "loss_weights"),
        ({"loss_type": ["sigmoid", "apo_zero"], "f_divergence_type": "forward_kl"}, "apo_zero"),
        ({"loss_type": "aot", "use_weighting": True}, "aot"),
        ({"loss_type": []}, "loss_type"),
        ({"loss_type": "sigmoids"}, "sigmoid"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        DpoConfig(**options)


def test_weights_and_tails_are_those_of_the_models_own_distributions():
    """WPO's weight of a pair and LD-DPO's sums, against a plain pass over each completion."""
    loaded = model()
    config = DpoConfig(use_weighting=True, ld_alpha=0.25)
    encoded = [_encode(loaded, p, 64) for p in (PAIRS[0], PAIRS[2])]  # two tokens each; two and three
    found = _logps(loaded, encoded, config)
    for i, pair in enumerate(encoded):
        weight, sums = 1.0, []
        for ids in (pair.chosen, pair.rejected):
            logits = loaded.model(input_ids=torch.tensor([pair.prompt + ids])).logits[0, len(pair.prompt) - 1 : -1]
            logps = logits.log_softmax(-1)
            own = logps[torch.arange(len(ids)), ids]
            weight *= float(torch.exp((own - logps.exp().square().sum(-1).log()).mean()).detach())
            shared = min(len(pair.chosen), len(pair.rejected))
            sums.append(float(own[:shared].sum() + 0.25 * own[shared:].sum()))
        assert float(found.weights[i]) == pytest.approx(weight, rel=1e-4)
        assert (float(found.chosen[i]), float(found.rejected[i])) == pytest.approx(tuple(sums), abs=1e-4)
    assert not found.weights.requires_grad


# --- training ---------------------------------------------------------------------------------------------------------

PAIRS = [
    Preference(prompt=f"{a}{b}=", chosen=a, rejected=wrong)
    for a in "abcdefgh"
    for b in "mnopqr"
    for wrong in (b, "", a + b)
]
SMALL = TinyConfig(hidden=32, layers=2, heads=2, mlp=64)


def model(lora=None):
    return load_model(ModelConfig(tiny=SMALL, lora=lora), seed=3, device="cpu")


@pytest.mark.parametrize("lora", [None, LoraConfig(r=4, alpha=8)], ids=["full", "lora"])
def test_a_policy_comes_to_prefer_what_was_chosen(lora):
    """On prompts that it did not see, and as far as the same model's own log-probs before and after say."""
    loaded, before = model(lora), model(lora)
    config = DpoConfig(learning_rate=1e-2 if lora else 3e-3, batch_size=16, num_train_epochs=8, held_out=0.25)
    metrics = train_dpo(loaded, PAIRS, config, seed=1)
    assert metrics["pairs"] + metrics["held_out"] == len(PAIRS) and metrics["too_long"] == 0
    assert metrics["held_out"] == 36 and metrics["steps"] == 8 * -(-108 // 16)
    assert metrics["eval_rewards/accuracies"] > 0.8 and metrics["eval_rewards/margins"] > 0
    assert metrics["loss"] < math.log(2) and metrics["eval_loss"] < math.log(2)

    def margin(of):
        found = _logps(of, [_encode(of, p, 64) for p in PAIRS])
        return (found.chosen - found.rejected).detach()

    assert float((margin(loaded) > margin(before)).float().mean()) > 0.8


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        {"f_divergence_type": "js_divergence"},
        {"use_weighting": True},
        {"ld_alpha": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_so_it_does_with_what_changes_a_loss(options):
    config = DpoConfig(learning_rate=3e-3, batch_size=16, num_train_epochs=8, held_out=0.25, **options)
    metrics = train_dpo(model(), PAIRS, config, seed=1)
    assert metrics["eval_rewards/accuracies"] > 0.8 and metrics["eval_rewards/margins"] > 0


def test_the_reference_is_the_model_before_the_first_step():
    """Also where an adapter has learned already: the margins reported are against that, not against the base model."""
    loaded = model(LoraConfig(r=4, alpha=8))
    train_dpo(loaded, PAIRS, DpoConfig(learning_rate=1e-2, batch_size=16, max_steps=10))
    still = train_dpo(loaded, PAIRS, DpoConfig(learning_rate=1e-30, batch_size=16, max_steps=1))
    assert still["eval_rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert still["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_log_probs_are_those_of_each_completion_alone():
    loaded = model()
    encoded = [_encode(loaded, p, 64) for p in PAIRS[:4]]
    found = _logps(loaded, encoded)
    for i, pair in enumerate(encoded):
        for side in ("chosen", "rejected"):
            ids = getattr(pair, side)
            assert ids[-1] == loaded.tokenizer.eos_token_id
            batch = pairs([pair.prompt], [ids], pad_id=loaded.pad_id, device=loaded.device)
            expected = float(completion_logps(loaded.model, batch).sum())
            assert float(getattr(found, side)[i]) == pytest.approx(expected, abs=1e-4)


def test_accumulation_is_the_same_as_a_larger_batch():
    config = {"learning_rate": 1e-3, "max_steps": 3, "held_out": 0.0, "gradient_checkpointing": False}
    whole, parts = model(), model()
    count = len(PAIRS) // 16 * 16  # no smaller batch at the end
    train_dpo(whole, PAIRS[:count], DpoConfig(batch_size=16, **config))
    train_dpo(parts, PAIRS[:count], DpoConfig(batch_size=4, gradient_accumulation_steps=4, **config))
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_long_pairs_are_cut_or_left_out():
    loaded = model()
    rows = [Preference(prompt="x" * 20, chosen="a", rejected="b"), Preference(prompt="x", chosen="a" * 9, rejected="b")]
    metrics = train_dpo(loaded, rows, DpoConfig(max_length=6, max_steps=1, held_out=0.0))
    assert metrics["too_long"] == 1 and metrics["pairs"] == 1
    cut = _encode(loaded, rows[1], 6)
    assert cut is not None and len(cut.prompt) + len(cut.chosen) == 6
    with pytest.raises(ValueError, match="max_length"):
        train_dpo(loaded, rows[:1], DpoConfig(max_length=6))


def test_conversations_are_written_by_the_chat_template():
    class Tokenizer:
        chat_template = "yes"

        def apply_chat_template(self, talk, *, tokenize, add_generation_prompt):
            assert not tokenize and add_generation_prompt
            return "".join(f"<{m['role']}>{m['content']}" for m in talk) + "<assistant>"

        def __call__(self, text, **options):
            return SimpleNamespace(input_ids=(text, options))

    talk = (("system", "s"), ("user", "u"))
    assert encode_prompt(Tokenizer(), talk) == ["<system>s<user>u<assistant>", {"add_special_tokens": False}]
    assert encode_prompt(Tokenizer(), "u") == ["u", {}]
    Tokenizer.chat_template = None
    assert encode_prompt(Tokenizer(), talk) == ["system: s\n\nuser: u", {}]
