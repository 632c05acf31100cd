"""Like `test_mutants.py`: defects of how rows with constraints and prompts that are scored are sampled."""

import numpy as np
import pytest
import torch

from engine.runner import batch as batch_module
from engine.runner import model_runner, row_masks
from engine.runner.prompt_rows import PromptRows
from engine.runner.row_masks import RowMasks
from engine.runner.sampling_state import SamplingState
from tests.support.engine.fake_model import OracleViolation


def masks_made_before_the_token_is_known(monkeypatch):
    """A constrained row is sampled at once, by what the constraint knew one token earlier."""
    monkeypatch.setattr(model_runner, "are_known", lambda masked: True)


def masks_made_once(monkeypatch):
    """A mask stays what it was when the request came."""
    monkeypatch.setattr(row_masks, "_shows", lambda row: (row.constraint, 0))


def masks_sent_from_the_table(monkeypatch):
    """The device copies masks from where the host is already writing the next ones."""
    upload = RowMasks._upload

    def mutant(self, rows, changed):
        send = upload(self, rows, changed)
        table = self._table

        def late():
            masks = send()
            self._device_table[:] = torch.from_numpy(table)
            return masks

        return late

    monkeypatch.setattr(RowMasks, "_upload", mutant)


def masks_of_the_row_before(monkeypatch):
    """Rows of the batch are masked as if all of them were constrained."""
    masked_rows = RowMasks.masked_rows

    def mutant(*args):
        rows = masked_rows(*args)
        return [row._replace(sample=index) for index, row in enumerate(rows)]

    monkeypatch.setattr(RowMasks, "masked_rows", mutant)


def outputs_that_came_along_not_replayed(monkeypatch):
    """A request that continues an answer is constrained as if it began one."""
    apply = RowMasks.apply

    def mutant(self, plan):
        for request in plan.new_requests:
            if request.constraint is not None and len(request.token_ids) > request.num_prompt_tokens:
                request.constraint.num_accepted = len(request.token_ids) - request.num_prompt_tokens
        apply(self, plan)

    monkeypatch.setattr(RowMasks, "apply", mutant)


def constraints_of_the_dead_stay(monkeypatch):
    """A mask is taken to be shown because the row it stands in had one before."""
    monkeypatch.setattr(row_masks, "_shows", lambda row: (None, row.position))


def prompts_scored_one_token_late(monkeypatch):
    """A prompt token is looked for in the logits that it makes itself."""
    fill = batch_module.fill_prompt_rows

    def mutant(plan, rows, num_samples, state, out):
        prompts = fill(plan, rows, num_samples, state, out)
        out.logits_indices[num_samples : num_samples + len(prompts.plan_rows)] += 1
        return prompts

    monkeypatch.setattr(batch_module, "fill_prompt_rows", mutant)


def prompts_forced_to_each_other(monkeypatch):
    """The tokens that rows are forced to become are those of the rows beside them."""
    fill = batch_module.fill_prompt_rows

    def mutant(plan, rows, num_samples, state, out):
        prompts = fill(plan, rows, num_samples, state, out)
        own = slice(num_samples, num_samples + len(prompts.plan_rows))
        out.forced_ids[own] = np.roll(out.forced_ids[own], 1)
        return prompts

    monkeypatch.setattr(batch_module, "fill_prompt_rows", mutant)


def prompts_penalised(monkeypatch):
    """Prompt tokens are adjusted as their request's next token is."""
    fill_forced = SamplingState.fill_forced

    def mutant(self, rows, own, out):
        top_logprobs = fill_forced(self, rows, own, out)
        out.doubles[:, own] = self._doubles[:, rows]
        return top_logprobs

    monkeypatch.setattr(SamplingState, "fill_forced", mutant)


def prompts_dealt_to_the_next_row(monkeypatch):
    """What a prompt has yielded is told of another row of the plan."""
    logprobs = PromptRows.logprobs

    def mutant(self, sampled, num_samples):
        rows = logprobs(self, sampled, num_samples)
        return dict(zip(rows, [*rows.values()][::-1], strict=True))

    monkeypatch.setattr(PromptRows, "logprobs", mutant)


MUTANTS = [
    (prompts_scored_one_token_late, (OracleViolation, AssertionError), "prompt|logits of tokens"),
    (prompts_forced_to_each_other, AssertionError, "prompt"),
    (prompts_penalised, OracleViolation, "is of a prompt"),
    (prompts_dealt_to_the_next_row, (OracleViolation, AssertionError), "prompt"),
    (masks_made_before_the_token_is_known, OracleViolation, "has mask"),
    (masks_made_once, OracleViolation, "has mask"),
    (masks_sent_from_the_table, OracleViolation, "has mask"),
    (masks_of_the_row_before, OracleViolation, "has mask"),
    (outputs_that_came_along_not_replayed, OracleViolation, "has mask"),
    (constraints_of_the_dead_stay, OracleViolation, "has mask"),
]


@pytest.mark.parametrize(("mutate", "error", "message"), MUTANTS, ids=[mutate.__name__ for mutate, _, _ in MUTANTS])
def test_mutant_is_found(monkeypatch, simulate_all, mutate, error, message):
    mutate(monkeypatch)
    with pytest.raises(error, match=message):
        simulate_all()
