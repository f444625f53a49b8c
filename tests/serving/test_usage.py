"""What a request consumed, in both protocols: guesses are counted with the tokens they were for."""

from openai.types import CompletionUsage

from hybrid_jax.engine.types import TokenEvent, Usage
from serving.grpc_api.messages import event_message
from serving.http_api.generation import total_usage, usage_body
from serving.http_api.schemas import UsageBody

ONE, OTHER = Usage(5, 7, 2, draft_tokens=9, accepted_tokens=4), Usage(11, 3, 1)


def test_openai_is_told_which_predictions_are_in_the_completion() -> None:
    usage = CompletionUsage.model_validate(usage_body(total_usage([ONE, None, OTHER])))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (16, 10, 26)
    assert usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens == 3
    details = usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 5)


def test_the_schema_has_every_field_of_the_body() -> None:
    assert UsageBody.model_validate(usage_body(ONE)).model_dump() == usage_body(ONE)


def test_grpc_tells_both_counts() -> None:
    usage = event_message(TokenEvent("a", 0, (), "", finish_reason="stop", usage=ONE)).usage
    assert (usage.draft_tokens, usage.accepted_tokens) == (9, 4)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 7, 2)
