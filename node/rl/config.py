"""Configuration of the language-model learner: model, task, rewards, GRPO and the supervised warm-up.

Every table is part of the run's manifest (equal on all peers); what is local to one node (cache folder, reward file,
device) is an argument of `build_learner` instead. Names and defaults of `GrpoConfig` are those of TRL's GRPOConfig where
the field means the same here. Does not read files: `node/config.py` does.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "group_expectation"]
KlEstimator = Literal["k1", "k2", "k3"]


class Table(BaseModel):
    """A frozen table whose unknown keys are errors and whose field docstrings are the descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TinyConfig(Table):
    """Shape of the built-in random transformer (`name = "tiny"`); its weights come from the run seed."""

    hidden: int = Field(default=96, ge=8, le=4096)
    """Width of the residual stream; must be divisible by `heads`. Parameters and time grow with its square."""
    layers: int = Field(default=4, ge=1, le=64)
    """Transformer blocks. More of them learn more per example and cost time in proportion."""
    heads: int = Field(default=4, ge=1, le=64)
    """Attention heads; `hidden / heads` must be even (rotary positions)."""
    mlp: int = Field(default=256, ge=8, le=16384)
    """Width of the gated feed-forward layer."""

    @model_validator(mode="after")
    def _divides(self) -> TinyConfig:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden = {self.hidden} must be a multiple of 2 x heads = {2 * self.heads}")
        return self


class LoraConfig(Table):
    """Low-rank adapters by PEFT. Only their matrices are trained and exchanged."""

    r: int = Field(default=16, ge=1, le=1024)
    """Rank. Traffic and adapter memory grow in proportion; 8 to 32 is usual for RL."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the adapter's output is multiplied by alpha / r. Raising it acts like a higher learning rate."""
    target_modules: str | list[str] = "all-linear"
    """"all-linear" (every linear layer but the output head) or the names of the modules that get an adapter."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter input. Above 0 the trainer's log-probs differ from the sampler's; keep 0 for RL."""
    freeze_a: bool = False
    """Train B alone, with A drawn from the run seed. Makes averaging over peers exact and halves the traffic; learns
    a little slower at the same rank."""


class ModelConfig(Table):
    """Which model is trained, and which part of it."""

    name: str = "tiny"
    """"tiny" (built from the run seed, no download), a local folder, a path to a .gguf file, or a hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the weights in memory. 16-bit halves memory and speeds up GPUs; trained parameters keep fp32 masters."""
    lora: LoraConfig | None = None
    """Adapter settings; absent means that every parameter is trained (full fine-tuning)."""
    tiny: TinyConfig = TinyConfig()
    """Shape of the built-in model; ignored for any other."""


class TaskConfig(Table):
    """Where prompts and scores come from."""

    name: str = "reasoning_gym:chain_sum"
    """"reasoning_gym:<task>", or the path of a JSONL file whose lines have `prompt` and `answer`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning_gym task, for example {"max_terms": 3}; must be empty for a JSONL file."""
    eval_size: int = Field(default=128, ge=1, le=10_000)
    """Held-out prompts, never trained on. More give a steadier accuracy and a longer evaluation."""
    eval_generations: int = Field(default=1, ge=1, le=64)
    """Sampled completions per held-out prompt behind the mean reward (the accuracy is greedy, one completion)."""
    prompt_template: str = "{prompt}"
    """Text around the task's prompt; must contain {prompt}."""
    system_prompt: str = ""
    """System message for models with a chat template; empty means none."""
    prompt_format: Literal["auto", "chat", "plain", "short"] = "auto"
    """"chat" applies the tokenizer's chat template, "plain" sends the text as it is, "short" keeps only what follows
    the last colon, without blanks ("3+4="), which makes a tiny model several times faster. "auto": short for the
    built-in model, chat where the tokenizer has a template, else plain."""
    extract: Literal["auto", "whole", "tag", "number"] = "auto"
    """Which part of a completion is the answer: the whole text, the last <answer>...</answer>, or the last number in
    it. "auto": the tag if there is one, else the whole text."""

    @model_validator(mode="after")
    def _has_prompt(self) -> TaskConfig:
        if "{prompt}" not in self.prompt_template:
            raise ValueError(f"prompt_template = {self.prompt_template!r} must contain {{prompt}}")
        return self


WEIGHT_MAX = 1e6  # of a reward; sums of weighted rewards must stay finite


class RewardsConfig(Table):
    """How a completion is scored."""

    functions: list[str] = ["task"]
    """Built-ins: "task" (the task's own score, 0 to 1), "exact" (1 if the answer matches to the letter), "format" (1 if
    the completion is one <answer>...</answer>), "think_format" (1 if it begins with its only <think>...</think>), "regex"
    (1 if it matches `pattern`), "overlong" (0 down to -1 near the length limit), "math" (math-verify), "code" (the
    fraction of the column `tests` that the completion's program passes), "judge" ([run.judge]), "reward_model". Any other
    name is a function of the node's reward file."""
    weights: list[float] | None = None
    """One weight per function, in the same order; absent means 1 each. The reward is the weighted sum."""
    timeout_seconds: float = Field(default=30.0, gt=0, le=3600)
    """Time a function of the reward file may take for one batch. On overrun its values count as "does not apply"."""
    pattern: str = ""
    """Regular expression of "regex"; the whole completion must match (a dot matches line ends too)."""
    overlong_length: int = Field(default=0, ge=0)
    """Tokens at which "overlong" reaches -1; 0 means grpo.max_completion_length."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before that from which "overlong" falls linearly; 0 punishes only what is longer."""
    reward_model: str = ""
    """Folder of the reward model of "reward_model" (`shoal reward-model` writes one), the same on every peer."""

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> RewardsConfig:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern = {self.pattern!r} is not a regular expression: {error}") from None
        if "reward_model" in self.functions and not self.reward_model:
            raise ValueError('functions has "reward_model": set reward_model to its folder')
        return self

    @model_validator(mode="after")
    def _lengths(self) -> RewardsConfig:
        if not self.functions:
            raise ValueError("functions is empty: name at least one, for example 'task'")
        if len(set(self.functions)) != len(self.functions):
            raise ValueError(f"functions = {self.functions} names one function twice")
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(f"{len(self.weights)} weights for {len(self.functions)} functions")
        if not all(abs(weight) <= WEIGHT_MAX for weight in self.weights or ()):  # NaN is not, either
            raise ValueError(f"weights = {self.weights}: each must be a number from {-WEIGHT_MAX:g} to {WEIGHT_MAX:g}")
        return self


class JudgeBackend(Table):
    """What one node judges with."""

    kind: Literal["model", "server", "function"] = "model"
    """"model": a language model in this process; "server": one behind an OpenAI-compatible API; "function": a function of
    the node's reward file, with the signature of a reward, giving 0 to 1."""
    model: str = "tiny"
    """For "model" a folder, .gguf file or hub id; for "server" the name that it knows the model by."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the weights of a "model"."""
    url: str = ""
    """For "server": where the API begins, for example http://127.0.0.1:8000/v1."""
    api_key_variable: str = ""
    """For "server": the environment variable that holds the key; empty sends none. The key itself is in no file."""
    function: str = ""
    """For "function": its name."""
    mode: Literal["rate", "compare"] = "rate"
    """"rate": each completion by itself, the expected value over the rating tokens; one forward pass each. "compare": pairs
    of a group, each asked in both orders, so that a liking for the first place cancels; more passes, finer differences."""
    rating_max: int = Field(default=9, ge=1, le=9)
    """Ratings go from 0 to this; each must be one token."""
    opponents: int = Field(default=3, ge=1, le=64)
    """For "compare": how many others of the group each completion meets."""
    template: str = ""
    """Prompt with {principles}, {prompt} and {completion} ({first} and {second} for "compare"); empty: the built-in one."""
    batch_size: int = Field(default=16, ge=1, le=4096)
    """Prompts per forward pass of a "model", or requests at once to a "server"."""
    timeout_seconds: float = Field(default=30.0, gt=0, le=3600)
    """For one request to a "server", or one call of a "function"."""

    @model_validator(mode="after")
    def _complete(self) -> JudgeBackend:
        if self.kind == "server" and not self.url.startswith(("http://", "https://")):
            raise ValueError(f'kind = "server" needs url = "http://..." or "https://...", found {self.url!r}')
        if self.kind == "function" and not self.function:
            raise ValueError('kind = "function" needs the name of a function of the reward file')
        slots = ("{prompt}", "{completion}") if self.mode == "rate" else ("{prompt}", "{first}", "{second}")
        if self.template and not all(slot in self.template for slot in slots):
            raise ValueError(f"template = {self.template[:60]!r} must contain {' and '.join(slots)}")
        return self


PRINCIPLES_CHARS_MAX = 16_384


class JudgeConfig(Table):
    """The reward "judge": by what principles and by whom completions are judged."""

    principles: str = Field(default="", max_length=PRINCIPLES_CHARS_MAX)
    """What makes an answer good, in plain words; judges read it before each answer. "@principles.txt" takes the text of a
    file beside the configuration; the text itself is in the manifest."""
    ask: Literal["own", "peers"] = "own"
    """"own": each node's own judge. "peers": the judges of other peers, combined by a weighted median; what is judged
    leaves this machine then (never that of a private [node.task])."""
    peers: int = Field(default=3, ge=1, le=64)
    """Judges asked per batch. More withstand more liars and cost each peer more work; odd numbers are best."""
    quorum: int = Field(default=2, ge=1, le=64)
    """With fewer answers the fallback is taken. A lone judge may lie, so 1 is for swarms of two."""
    budget_seconds: float = Field(default=20.0, gt=0, le=600)
    """Time for all answers of a batch; who is slower is not counted."""
    fallback: Literal["own", "none"] = "own"
    """Without a quorum: this node's own judge, or no reward for the batch (it is skipped)."""
    backend: JudgeBackend = JudgeBackend()
    """[run.judge.backend], what each node judges with; a node may have its own: [node.judge]."""

    @model_validator(mode="after")
    def _reachable(self) -> JudgeConfig:
        if self.backend.kind == "server":  # or whoever founds a run could make its members call any address
            raise ValueError('backend.kind = "server": a server is each node\'s own choice; set [node.judge] instead')
        if self.quorum > self.peers:
            raise ValueError(f"quorum = {self.quorum} can never be reached with peers = {self.peers}")
        return self


class GrpoConfig(Table):
    """Group-relative policy optimization, with TRL's names."""

    num_generations: int = Field(default=8, ge=2, le=1024)
    """Completions per prompt (the group). More give a better baseline and cost sampling time; nothing must divide."""
    prompts_per_step: int = Field(default=8, ge=1, le=4096)
    """Prompts per inner step; a step samples prompts_per_step x num_generations completions."""
    max_completion_length: int = Field(default=512, ge=1, le=65_536)
    """Completion limit in tokens. Too low cuts answers off (watch `truncated`); time and memory grow with it."""
    micro_batch_size: int = Field(default=0, ge=0)
    """Completions per forward and backward pass, 0 for all at once. Bounds memory; never changes the loss."""
    gradient_checkpointing: bool = True
    """Run layers again in the backward pass instead of keeping their activations, those beyond `activations_mib`: up to
    half more time in the update, and memory for one layer more instead of all of them."""
    activations_mib: int = Field(default=1024, ge=0, le=1_048_576)
    """Memory (MiB) for activations that are kept all the same, per micro-batch: as many layers as fit are not run again.
    0 saves the most memory; with `gradient_checkpointing = false` all are kept, whatever they take."""
    bf16: bool = False
    """Compute the update's forward and backward pass in bfloat16 (autocast), parameters and loss stay in 32 bits.
    Faster on GPUs, less exact; sampling stays as it is, so the sampler is then not the trainer."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Sampling temperature, also applied to the trainer's log-probs. Lower explores less."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this mass. Below 1 the sampler is not the trainer."""
    top_k: int = Field(default=0, ge=0)
    """Keep only this many most likely tokens, 0 for all. Above 0 the sampler is not the trainer."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens less likely than this times the most likely one. Above 0 the sampler is not the trainer."""
    stop_strings: list[str] = Field(default_factory=list, max_length=16)
    """A completion ends as soon as its text contains one of these; the text stays in it and is trained on."""
    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """Inner AdamW step size. LoRA wants about ten times more than full fine-tuning; too high collapses the policy."""
    warmup_steps: int = Field(default=0, ge=0)
    """Inner steps over which the learning rate rises linearly from 0: AdamW's first steps are mostly noise."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient's L2 norm is clipped to this."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the base model. 0 saves the reference forward pass; above 0 keeps the policy near."""
    kl_estimator: KlEstimator = "k3"
    """"k3" is never negative and has a low variance; "k2" has the right gradient on-policy; "k1" is unbiased and noisy,
    and only with `use_bias_correction_kl` does its gradient pull towards the base model."""
    use_bias_correction_kl: bool = True
    """Weight the KL estimate by the importance ratio, so that it stays unbiased off-policy."""
    num_iterations: int = Field(default=1, ge=1, le=64)
    """Optimizer steps per batch of rollouts. More reuse samples and drift off-policy."""
    epsilon: float = Field(default=0.2, gt=0)
    """Lower clip range of the importance ratio."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Upper clip range; absent means `epsilon`. DAPO uses 0.28; for "cispo" it is the cap itself, about 5."""
    delta: float | None = Field(default=None, gt=0)
    """Cap on the unclipped ratio (two-sided clipping); must exceed 1 + epsilon_high. Absent means none."""
    loss_type: LossType = "dapo"
    """Which objective and normalizer: "dapo" divides by all completion tokens, "grpo" averages per sequence first,
    "dr_grpo" divides by the fixed length limit, "bnpo" equals "dapo" here (the whole step is one batch)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio per token, or one per sequence (GSPO; use it with loss_type "grpo" and epsilons near 3e-4)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group, of the batch, or not at all."""
    leave_one_out: bool = False
    """Compare a completion with the mean of the group's others (RLOO) instead of the mean of all: unbiased, and
    advantages are larger by n / (n - 1), which matters in small groups with scale_rewards "none"."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """With several rewards: sum, then subtract and scale; or normalize each within its group first (GDPO), so that one
    with a large spread does not drown the others. The second has its own scaling over the batch."""
    mask_truncated_completions: bool = False
    """Leave completions that hit the length limit out of the loss."""
    top_entropy_quantile: float = Field(default=1.0, ge=0, le=1)
    """Keep only this part of the tokens, those of highest entropy, in the policy term (0.2 is usual; 1 keeps all). With
    more than one micro-batch it costs a forward pass more, so that the split does not matter."""
    entropy_coef: float = Field(default=0.0)
    """Weight of an entropy bonus (mean over tokens, nats). Above 0 keeps the policy exploring; too high makes noise."""
    sapo_temperature_pos: float = Field(default=1.0, gt=0)
    """SAPO: gate temperature for positive advantages."""
    sapo_temperature_neg: float = Field(default=1.05, gt=0)
    """SAPO: gate temperature for the others."""
    vespo_k_pos: float = 2.0
    """VESPO: power of the gamma weight, advantages >= 0."""
    vespo_lambda_pos: float = Field(default=3.0, gt=0)
    """VESPO: decay of the gamma weight, advantages >= 0."""
    vespo_k_neg: float = 3.0
    """VESPO: power of the gamma weight, advantages < 0."""
    vespo_lambda_neg: float = Field(default=2.0, gt=0)
    """VESPO: decay of the gamma weight, advantages < 0."""
    off_policy_mask_threshold: float | None = Field(default=None, gt=0)
    """Drop sequences with negative advantage whose mean KL from the sampler exceeds this. Absent means keep all."""
    vllm_importance_sampling_correction: Literal["auto"] | bool = "auto"
    """Weight the loss by trainer / sampler probability. "auto": on whenever the sampler is not the trainer
    (top-p, top-k, 16-bit weights, or samples from elsewhere)."""
    vllm_importance_sampling_mode: CorrectionMode = "sequence_mask"
    """Weight per token or per sequence, and whether one beyond the bounds is cut to them or drops its part.
    "group_expectation" (GEPO) compares with the sampler's expectation over the group and is cut: for stale samples."""
    vllm_importance_sampling_clip_max: float | None = Field(default=3.0, gt=0)
    """Upper bound of that weight."""
    vllm_importance_sampling_clip_min: float | None = Field(default=None, ge=0)
    """Lower bound of that weight; absent means none."""

    @model_validator(mode="after")
    def _consistent(self) -> GrpoConfig:
        if self.delta is not None and self.delta <= 1 + self.clip_high:
            raise ValueError(f"delta = {self.delta} must exceed 1 + epsilon_high = {1 + self.clip_high}")
        if self.loss_type == "vespo" and self.importance_sampling_level != "token":
            raise ValueError('loss_type = "vespo" needs importance_sampling_level = "token"')
        if self.loss_type == "luspo" and self.importance_sampling_level != "sequence":
            raise ValueError('loss_type = "luspo" needs importance_sampling_level = "sequence"')
        if self.multi_objective_aggregation == "normalize_then_sum" and (
            self.leave_one_out or self.scale_rewards != "group"
        ):
            raise ValueError(
                'multi_objective_aggregation = "normalize_then_sum" has its own baseline and scale: it needs '
                'leave_one_out = false and scale_rewards = "group"'
            )
        if self.beta and self.kl_estimator == "k1" and not self.use_bias_correction_kl:
            raise ValueError('kl_estimator = "k1" needs use_bias_correction_kl: its own gradient is zero on average')
        per_sequence = not self.vllm_importance_sampling_mode.startswith("token")
        if self.loss_type == "vespo" and per_sequence and self.vllm_importance_sampling_correction is not False:
            raise ValueError('loss_type = "vespo" needs vllm_importance_sampling_mode = "token_..."')
        return self

    @property
    def clip_high(self) -> float:
        """`epsilon_high` or, where that is absent, `epsilon`."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class SamplerConfig(Table):
    """Where this node's completions come from; local to the node, not part of the manifest."""

    kind: Literal["builtin", "vllm", "sglang", "llama.cpp"] = "builtin"
    """"builtin" samples from the trainer's own weights. The others ask an inference server, which is faster on a GPU of
    its own; its numbers differ a little from the trainer's, so the importance correction is on."""
    url: str = ""
    """Where the server listens, for example "http://127.0.0.1:8000"."""
    model: str = ""
    """The server's name of the base model, which must be the run's; empty asks the server. llama.cpp: the section of
    the router's presets whose `lora` is `push_dir`/adapter.gguf."""
    api_key: str = ""
    """Sent as a bearer token. Better set by the environment: SHOAL_NODE__SAMPLER__API_KEY."""
    push_dir: str = ""
    """Folder that the server can read, for pushed adapters or weights; empty: `sampler` in the data directory."""
    push_every_steps: int = Field(default=1, ge=0, le=10_000)
    """Push what was learned every so many inner steps, and at the start of each round; 0: only at the start of each
    round. Rarer pushes save time and make samples staler, which the importance correction makes up for."""
    concurrency: int = Field(default=16, ge=1, le=1024)
    """Requests in flight at once; one request carries the whole group of a prompt."""
    timeout_seconds: float = Field(default=300.0, gt=0, le=3600)
    """For one request or push, retries included. After that the step samples with the built-in sampler."""

    @model_validator(mode="after")
    def _has_url(self) -> SamplerConfig:
        if self.kind != "builtin" and not self.url.startswith(("http://", "https://")):
            raise ValueError(f'kind = "{self.kind}" needs url = "http://host:port", got {self.url!r}')
        return self


class WarmupConfig(Table):
    """A short supervised stage on prompt -> answer pairs before RL, run once by the founder of the run."""

    steps: int = Field(default=0, ge=0, le=1_000_000)
    """Optimizer steps; 0 means no warm-up. Too many leave RL nothing to learn."""
    seconds_max: float = Field(default=60.0, gt=0)
    """Ends the stage early after this time."""
    learning_rate: float = Field(default=1e-3, gt=0, le=1)
    """AdamW step size of the stage."""
    batch_size: int = Field(default=64, ge=1, le=4096)
    """Pairs per step."""
    target_reward: float | None = Field(default=None, gt=0, le=1)
    """Stop as soon as the sampled reward on training prompts reaches this, so that RL keeps room. Absent: do not look."""


def demo_defaults() -> dict[str, Any]:
    """The tables of `shoal demo`: the tiny model on single-digit sums, tuned for a few minutes on two cores.

    "rounds" holds the suggested number of rounds, the samples that close a round by the number of peers, and the samples
    that one peer makes in all: for another number of rounds, peers x samples_per_peer / rounds closes one.
    """
    return {
        "model": {"name": "tiny", "tiny": {"hidden": 64, "layers": 4, "heads": 4, "mlp": 192}},
        "task": {
            "name": "reasoning_gym:chain_sum",
            "options": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
            "eval_size": 128,
            "eval_generations": 4,
        },
        "rewards": {"functions": ["task"]},
        "grpo": {
            "num_generations": 8,
            "prompts_per_step": 32,
            "max_completion_length": 4,
            "gradient_checkpointing": False,
            "learning_rate": 3e-4,
            "warmup_steps": 10,
            "adam_beta2": 0.99,
        },
        "warmup": {"steps": 220, "seconds_max": 60.0, "learning_rate": 2e-3, "batch_size": 64},
        "rounds": {"count": 20, "target_samples": {"3": 15_360, "4": 20_480}, "samples_per_peer": 102_400},
    }
