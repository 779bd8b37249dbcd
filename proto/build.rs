//! Compiles the schema with protox, so that no `protoc` is needed, and generates the gRPC service
//! on the domain types.

#[cfg(feature = "grpc")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    schema::compile()
}

/// Nothing is compiled.
#[cfg(not(feature = "grpc"))]
fn main() {}

#[cfg(feature = "grpc")]
mod schema {
    use std::error::Error;

    use tonic_build::manual::{Builder, Method, Service};

    pub(super) fn compile() -> Result<(), Box<dyn Error>> {
        println!("cargo::rerun-if-changed=elasticdl");
        let descriptors = protox::compile(["elasticdl/v1/master.proto"], ["."])?;
        // A long list is sent to up to a thousand workers, which share one copy of it.
        let builder = tonic_prost_build::configure()
            .build_client(false)
            .build_server(false)
            .bytes(".elasticdl.v1.Dataset.packed");
        builder.compile_fds(descriptors)?;
        Builder::new().compile(&[master()]);
        Ok(())
    }

    /// The service of the schema, with the types that the codec converts to and from its messages.
    fn master() -> Service {
        Service::builder()
            .package("elasticdl.v1")
            .name("Master")
            .comment("Streams of workers, and requests of user commands.")
            .method(
                method("join", "Join", "JoinRequest", "JoinResponse")
                    .client_streaming()
                    .server_streaming()
                    .build(),
            )
            .method(method("status", "Status", "StatusRequest", "Status").build())
            .method(method("scale", "Scale", "ScaleRequest", "ScaleReply").build())
            .method(
                method("checkpoint", "Checkpoint", "CheckpointRequest", "CheckpointReply").build(),
            )
            .method(method("suspend", "Suspend", "SuspendRequest", "SuspendReply").build())
            .method(method("inspect", "Inspect", "InspectRequest", "Inspection").build())
            .build()
    }

    fn method(
        name: &str,
        route: &str,
        input: &str,
        output: &str,
    ) -> tonic_build::manual::MethodBuilder {
        Method::builder()
            .name(name)
            .route_name(route)
            .input_type(format!("crate::wire::{input}"))
            .output_type(format!("crate::wire::{output}"))
            .codec_path("crate::wire::Codec")
    }
}
