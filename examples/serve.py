"""Ask a model that is not trained: an inference job, which lives as long as this program.

Start a cluster with `opentinker up`, then run `python examples/serve.py`.
"""

import opentinker as ot
from opentinker.client.messages import SamplingParams
from opentinker.client.policy import PolicyClient
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.tokenizer import ChatTokenizer


async def ask(policy: PolicyClient, question: str) -> str:
    """The model's answer. Text becomes tokens here, by the model's own chat template; the server sees tokens only."""
    tokenizer = ChatTokenizer.from_files(await policy.tokenizer_files())
    renderer = ConversationRenderer(tokenizer, (await policy.info())["stop_token_ids"])
    prompt = renderer.render_prompt([{"role": "user", "content": question}])
    params = SamplingParams(max_tokens=64, temperature=0.7, stop_token_ids=renderer.stop_token_ids)
    result = await policy.sample(prompt, params)
    return renderer.parse(result.samples[0].tokens.tolist()).text


if __name__ == "__main__":
    with ot.Client("http://127.0.0.1:8780") as client, client.serve("smollm2-135m") as job:
        print(job.run(lambda policy: ask(policy, "What is the capital of France?")))
