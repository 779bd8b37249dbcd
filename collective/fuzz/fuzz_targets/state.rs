#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = elasticdl_collective::testing::fuzzing::state(data);
});
