//! Generates the gRPC service on the types of this crate.

#[cfg(feature = "grpc")]
fn main() {
    use tonic_build::manual::{Builder, Method, MethodBuilder, Service};

    fn method(name: &str, route: &str) -> MethodBuilder {
        let output = if route == "Status" { route.to_owned() } else { format!("{route}Reply") };
        Method::builder()
            .name(name)
            .route_name(route)
            .input_type(format!("crate::wire::{route}Request"))
            .output_type(format!("crate::wire::{output}"))
            .codec_path("crate::wire::Codec")
    }
    let join = method("join", "Join").output_type("crate::wire::JoinResponse");
    // The number is that of the encoding: a peer with another one has no such service.
    let master = Service::builder()
        .package("elasticdl.v2")
        .name("Master")
        .comment("Streams of workers, and requests of user commands.")
        .method(join.client_streaming().server_streaming().build())
        .method(method("status", "Status").build())
        .method(method("scale", "Scale").build())
        .method(method("checkpoint", "Checkpoint").build())
        .method(method("suspend", "Suspend").build())
        .build();
    Builder::new().compile(&[master]);
    println!("cargo::rerun-if-changed=build.rs");
}

/// Nothing is generated.
#[cfg(not(feature = "grpc"))]
fn main() {}
