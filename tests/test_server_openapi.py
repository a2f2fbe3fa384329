"""The endpoints keep to their OpenAPI document, whatever schemathesis sends."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import positive_data_acceptance
from server_support import table_server

ENDPOINTS = [
    ("POST", "/v1/chat/completions", 60),
    ("POST", "/v1/completions", 30),
    ("POST", "/smc/run", 30),
    ("GET", "/v1/models", 2),
    ("GET", "/v1/models/{name}", 10),
    ("GET", "/healthz", 2),
    ("GET", "/metrics", 2),
]


@pytest.fixture(scope="module")
def document():
    with table_server(n_particles=2, max_tokens=3, max_schema_seconds=2.0, deadline=5.0) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


def test_every_endpoint_of_the_document_is_tried(document):
    paths = {(op.ok().method.upper(), op.ok().path) for op in document.get_all_operations()}
    assert paths == {(method, path) for method, path, _ in ENDPOINTS}


@pytest.mark.parametrize(("method", "path", "examples"), ENDPOINTS)
def test_answers_keep_to_the_document(document, method, path, examples):
    operation = document[path][method]

    @given(operation.as_strategy())
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def send(case):
        # Fields exclude or need each other in ways that a schema does not say: what fits the
        # schema may be refused.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    send()
