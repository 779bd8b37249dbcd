//! Compiles the schema with protox, so that no `protoc` is needed.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=elasticdl");
    let descriptors = protox::compile(["elasticdl/v1/master.proto"], ["."])?;
    // A long list is sent to up to a thousand workers, which share one copy of it.
    let builder = tonic_prost_build::configure().bytes(".elasticdl.v1.Dataset.packed");
    builder.compile_fds(descriptors)?;
    Ok(())
}
