"""Vertex AI on loopback: a gRPC server with the methods that a deployment calls, which keeps the requests."""

import contextlib
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from google.cloud.aiplatform_v1.types import (
    DeployedModel,
    Endpoint,
    Model,
    endpoint_service,
    model_service,
)
from google.longrunning import operations_pb2

PARENT = "projects/a-project/locations"


class FakeVertex:
    """`refused` names a method that answers with an error."""

    def __init__(self, refused: str | None = None):
        self.requests: list[tuple[str, Any]] = []
        self.refused = refused
        self._endpoint = Endpoint()

    def upload_model(self, request: Any) -> Any:
        return _done(model_service.UploadModelResponse(model=f"{request.parent}/models/7", model_version_id="1"))

    def get_model(self, request: Any) -> Any:
        shared = Model.DeploymentResourcesType.DEDICATED_RESOURCES
        return Model(name=request.name, supported_deployment_resources_types=[shared], version_id="1")

    def create_endpoint(self, request: Any) -> Any:
        self._endpoint = Endpoint(name=f"{request.parent}/endpoints/8", display_name=request.endpoint.display_name)
        return _done(self._endpoint)

    def get_endpoint(self, request: Any) -> Any:
        return Endpoint(self._endpoint, name=request.name)

    def deploy_model(self, request: Any) -> Any:
        return _done(endpoint_service.DeployModelResponse(deployed_model=DeployedModel(id="9")))

    @contextlib.contextmanager
    def listening(self) -> Iterator[str]:
        """The address that it listens on meanwhile."""
        server = grpc.server(futures.ThreadPoolExecutor(2))
        model, endpoint = model_service, endpoint_service
        methods = {
            "ModelService": (("UploadModel", model.UploadModelRequest), ("GetModel", model.GetModelRequest)),
            "EndpointService": (
                ("CreateEndpoint", endpoint.CreateEndpointRequest),
                ("GetEndpoint", endpoint.GetEndpointRequest),
                ("DeployModel", endpoint.DeployModelRequest),
            ),
        }
        for service, each in methods.items():
            handlers = {name: self._handler(name, kind) for name, kind in each}
            full = f"google.cloud.aiplatform.v1.{service}"
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(full, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()

    def _handler(self, name: str, kind: Any) -> Any:
        method = getattr(self, "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_"))

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            if name == self.refused:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no chips are left")
            if not name.startswith("Get"):
                self.requests.append((name, request))
            return method(request)

        return grpc.unary_unary_rpc_method_handler(answer, kind.deserialize, _serialize)


def _serialize(message: Any) -> bytes:
    return message.SerializeToString() if hasattr(message, "SerializeToString") else type(message).serialize(message)


def _done(response: Any) -> operations_pb2.Operation:
    """An operation that is finished at once."""
    operation = operations_pb2.Operation(name=f"{PARENT}/us-west1/operations/1", done=True)
    operation.response.Pack(type(response).pb(response))
    return operation
