"""Research decoding: sessions whose logits and memory are yours, and strategies written on them.

>>> from hybrid_jax import load_model
>>> from hybrid_jax.bundled import bundled_model
>>> from hybrid_jax.decoding import PromptLookup, Workspace, beam_search, generate, speculate
>>> model = load_model(bundled_model(), dtype="float32")
>>> space = Workspace(model, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=32)
>>> session = space.session()
>>> logits = session.prefill([5, 17, 200, 31])  # of the next token
>>> one, two = session.fork(2)  # they share the past, nothing is copied
>>> tokens, acceptance = speculate(one, PromptLookup())
>>> tokens == generate(two)
True
>>> [best, *_] = beam_search(session, num_beams=4)
>>> len(best.token_ids)
16
>>> sorted(session.state(0))  # numpy arrays; `set_state` puts them back
['conv', 'recurrent']

The memory of a session is that of serving (`hybrid_jax.cache`), and so is the compiled step.
"""

from hybrid_jax.decoding.beam import Hypothesis as Hypothesis
from hybrid_jax.decoding.beam import beam_search as beam_search
from hybrid_jax.decoding.best_of import Vote as Vote
from hybrid_jax.decoding.best_of import best_of_n as best_of_n
from hybrid_jax.decoding.best_of import self_consistency as self_consistency
from hybrid_jax.decoding.contrastive import Contrastive as Contrastive
from hybrid_jax.decoding.diverse_beam import diverse_beam_search as diverse_beam_search
from hybrid_jax.decoding.guidance import Guided as Guided
from hybrid_jax.decoding.sampling import Completion as Completion
from hybrid_jax.decoding.sampling import Sampler as Sampler
from hybrid_jax.decoding.sampling import generate as generate
from hybrid_jax.decoding.sampling import sample_many as sample_many
from hybrid_jax.decoding.scoring import Score as Score
from hybrid_jax.decoding.scoring import loglikelihood as loglikelihood
from hybrid_jax.decoding.scoring import perplexity as perplexity
from hybrid_jax.decoding.scoring import prompt_logprobs as prompt_logprobs
from hybrid_jax.decoding.session import KV as KV
from hybrid_jax.decoding.session import Session as Session
from hybrid_jax.decoding.speculative import Acceptance as Acceptance
from hybrid_jax.decoding.speculative import DraftModel as DraftModel
from hybrid_jax.decoding.speculative import speculate as speculate
from hybrid_jax.decoding.typical import typical as typical
from hybrid_jax.decoding.workspace import Workspace as Workspace
from hybrid_jax.drafts import PromptLookup as PromptLookup
