"""crewai: a crew of one agent with the task's tools."""

import work
from crewai import LLM, Agent, Crew, Task
from crewai.tools import BaseTool
from pydantic import create_model


def tool(schema):
    fields = dict.fromkeys(schema["parameters"]["properties"], (str, ...))

    class Offered(BaseTool):
        name: str = schema["name"]
        description: str = schema["description"]
        args_schema: type = create_model(schema["name"], **fields)

        def _run(self, **arguments):
            return work.use(schema["name"], arguments)

    return Offered()


llm = LLM(model=f"openai/{work.MODEL}", base_url=work.URL, api_key=work.KEY, stream=work.STREAM, timeout=work.TIMEOUT_S)
agent = Agent(
    role="worker",
    goal="Do the task",
    backstory=work.SYSTEM or "You work alone.",
    llm=llm,
    tools=[tool(schema) for schema in work.SCHEMAS],
    max_iter=work.TURNS,
)
task = Task(description=work.PROMPT, expected_output="The answer alone", agent=agent)
work.answer(Crew(agents=[agent], tasks=[task]).kickoff().raw)
