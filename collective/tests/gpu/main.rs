//! Device groups on fake CUDA and NCCL libraries: the conformance suite, and faults.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod faults;
mod group;
mod operations;
mod overlap;
#[macro_use]
#[path = "../suite/mod.rs"]
mod suite;

use elasticdl_collective::device::Path;

conforms!(over_the_host, true, |world| group::form(world, Path::Host));
conforms!(over_nccl, true, |world| group::form(world, Path::Nccl));
