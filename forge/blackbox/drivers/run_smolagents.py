"""smolagents: its tool-calling agent with the task's tools; it ends by a call of its own tool `final_answer`."""

import work
from smolagents import OpenAIModel, Tool, ToolCallingAgent


def tool(schema):
    names = list(schema["parameters"]["properties"])

    class Offered(Tool):
        name = schema["name"]
        description = schema["description"]
        inputs = {key: {"type": "string", "description": key} for key in names}  # noqa: RUF012 - its own convention
        output_type = "string"
        skip_forward_signature_validation = True

        def forward(self, **arguments):
            return work.use(schema["name"], arguments)

    return Offered()


model = OpenAIModel(model_id=work.MODEL, api_base=work.URL, api_key=work.KEY, client_kwargs={"timeout": work.TIMEOUT_S})
agent = ToolCallingAgent(
    tools=[tool(schema) for schema in work.SCHEMAS],
    model=model,
    max_steps=work.TURNS,
    stream_outputs=work.STREAM,
    instructions=work.SYSTEM or None,
)
work.answer(agent.run(work.PROMPT))
