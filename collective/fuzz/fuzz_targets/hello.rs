#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| elasticdl_collective::testing::fuzzing::hello(data));
