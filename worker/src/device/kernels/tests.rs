//! The kernels' source, compiled for the host.

use std::ffi::c_void;
use std::process::Command;

use super::*;
use crate::Schedule;
use crate::optimizer::{AdamW, Sgd};
use crate::update::Update;

/// The kernels as plain functions.
struct Host {
    library: libloading::Library,
    _folder: tempfile::TempDir,
}

impl Host {
    fn compile() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (source, library) = (folder.path().join("kernels.c"), folder.path().join("kernels.so"));
        std::fs::write(&source, SOURCE).unwrap();
        let options =
            ["-shared", "-fPIC", "-O2", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Werror"];
        let output = Command::new("cc")
            .args(options)
            .arg("-o")
            .args([&library, &source])
            .arg("-lm")
            .output();
        let output = output.expect("there is a C compiler");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: loading the library runs no code.
        let library = unsafe { libloading::Library::new(&library) }.unwrap();
        Self { library, _folder: folder }
    }

    /// Executes a kernel like a launch; addresses are the host's.
    fn launch<A: DeviceRepr>(&self, name: &str, threads: usize, arguments: &A) {
        // SAFETY: all kernels that are compiled for the host have this type.
        let kernel =
            unsafe { self.library.get::<unsafe extern "C" fn(*mut *const c_void, u64)>(name) };
        let kernel = kernel.unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut arguments = [std::ptr::from_ref(arguments).cast::<c_void>()];
        // SAFETY: the test's arguments point to slices of the given lengths.
        unsafe { kernel(arguments.as_mut_ptr(), threads as u64) }
    }

    /// Executes a reduction.
    fn fold(
        &self,
        name: &str,
        (values, len): (u64, usize),
        start: usize,
        (threads, results): (usize, usize),
    ) -> Vec<u64> {
        let mut found = vec![0u64; results];
        let fold = Fold {
            values,
            results: found.as_mut_ptr() as u64,
            len: len as u64,
            start: start as u64,
        };
        self.launch(name, threads, &fold);
        found
    }

    /// Like [`Kernels::begin_digests`], for one slice.
    fn digest(&self, slice: &[f32], start: usize) -> u64 {
        let values = (slice.as_ptr() as u64, slice.len());
        self.fold("digests", values, start, (fold_threads(slice.len()), 1))[0]
    }

    /// Like [`Kernels::begin_check`].
    fn is_finite(&self, slice: &[f32]) -> bool {
        let values = (slice.as_ptr() as u64, slice.len());
        self.fold("nonfinite", values, 0, (fold_threads(slice.len()), 1)) == [0]
    }

    /// See [`Kernels::clip`].
    fn clip_scale(&self, limit: f64, records: u64, sum: &[f32]) -> f32 {
        let all = fold_threads(sum.len());
        let values = (sum.as_ptr() as u64, sum.len());
        let partials = self.fold("square_sums", values, 0, (all, all));
        let (partials, passes) = ((partials.as_ptr() as u64, all), SECOND_PASS_THREADS);
        let second_pass = self.fold("double_sums", partials, 0, (passes, passes));
        let mut scale = f32::NAN;
        let clip = Clip {
            square_sums: second_pass.as_ptr() as u64,
            scale: std::ptr::from_mut(&mut scale) as u64,
            len: SECOND_PASS_THREADS as u64,
            limit,
            records: records as f64,
        };
        self.launch("clip_scale", 1, &clip);
        scale
    }
}

fn numbers(len: usize, seed: u64) -> Vec<f32> {
    use rand::{RngExt, SeedableRng};
    let mut random = rand::rngs::ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| random.random_range(-2.0f32..2.0)).collect()
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Several elements per thread in several blocks, and a remainder.
const LEN: usize = 5003;

#[test]
fn nans_and_infinities_are_found_at_any_position() {
    let host = Host::compile();
    for len in [0, 1, 5, 1000, 9 * FOLD_THREADS_MAX + 7] {
        let mut values = numbers(len, 3);
        assert!(host.is_finite(&values), "{len}");
        let eighth = 7 * FOLD_THREADS_MAX;
        let at = [0, len / 2, len.saturating_sub(1), eighth, eighth + FOLD_THREADS_MAX];
        for at in at.into_iter().filter(|at| *at < len) {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let good = std::mem::replace(&mut values[at], bad);
                assert!(!host.is_finite(&values), "{bad} at {at} of {len}");
                values[at] = good;
            }
        }
    }
}

#[test]
fn a_step_is_bit_identical_to_the_cpu() {
    let host = Host::compile();
    let schedule = Schedule::constant().warmup(3);
    let (sgd, adam_w) = (Sgd::new(0.1), AdamW::new(0.003).betas(0.8, 0.95).weight_decay(0.1));
    for (name, optimizer) in [
        ("sgd", Optimizer::from(sgd)),
        ("sgd", Optimizer::from(sgd.weight_decay(0.01)).schedule(schedule)),
        ("sgd_momentum", sgd.momentum(0.9).weight_decay(0.01).into()),
        ("sgd_nesterov", sgd.momentum(0.9).nesterov().into()),
        ("adam_w", Optimizer::from(adam_w).schedule(schedule)),
    ] {
        let mut on_cpu = (numbers(LEN, 1), vec![0.0; optimizer.slots() * LEN]);
        let mut on_gpu = on_cpu.clone();
        for step in 0..5 {
            let sum = numbers(LEN, 10 + step);
            let (parameters, slots) = (&mut on_cpu.0[..], &mut on_cpu.1[..]);
            optimizer.apply(Update::new(step, 7, &sum, parameters, slots));
            let slots = on_gpu.1.as_mut_ptr() as u64;
            let arguments_base = Step {
                sum: sum.as_ptr() as u64,
                parameters: on_gpu.0.as_mut_ptr() as u64,
                first: slots,
                second: slots + (LEN * size_of::<f32>()) as u64,
                len: LEN as u64,
                scale: (1.0 / 7.0) as f32,
                ..Step::default()
            };
            let arguments = match optimizer.arithmetic(step) {
                Arithmetic::AdamW(constants) => constants.fill(arguments_base),
                Arithmetic::Momentum(constants)
                | Arithmetic::Nesterov(constants)
                | Arithmetic::Plain(constants) => constants.fill(arguments_base),
            };
            host.launch(name, threads(LEN), &arguments);
        }
        assert_ne!(bits(&on_cpu.0), bits(&numbers(LEN, 1)), "{optimizer:?}");
        assert_eq!(bits(&on_cpu.0), bits(&on_gpu.0), "{optimizer:?}");
        assert_eq!(bits(&on_cpu.1), bits(&on_gpu.1), "{optimizer:?}");
    }
}

#[test]
fn a_clipped_step_reads_its_scale_from_device_memory() {
    let host = Host::compile();
    let sum = numbers(LEN, 3);
    let norm = sum.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    for (limit, records, expected) in
        [(1.0, 4, 1.0 / (norm / 4.0 + 1e-6) / 4.0), (norm, 4, 1.0 / 4.0)]
    {
        let scale = host.clip_scale(limit, records, &sum);
        let expected = expected as f32;
        assert!((scale - expected).abs() < 1e-6 * expected, "{scale} is not {expected}");
    }
    let mut parameters = vec![0.0; LEN];
    let clipped = 0.25f32;
    let step = Step {
        sum: sum.as_ptr() as u64,
        parameters: parameters.as_mut_ptr() as u64,
        clipped: std::ptr::from_ref(&clipped) as u64,
        len: LEN as u64,
        scale: 99.0,
        rate: 1.0,
        ..Step::default()
    };
    host.launch("sgd", threads(LEN), &step);
    assert!(parameters.iter().zip(&sum).all(|(parameter, sum)| *parameter == -(sum * clipped)));
}

#[test]
fn every_element_is_added_once() {
    let host = Host::compile();
    for len in [1, 255, 256, 257, LEN, 1 << 20] {
        let (values, before) = (numbers(len, 1), numbers(len, 2));
        let mut sum = before.clone();
        let add =
            Add { values: values.as_ptr() as u64, sum: sum.as_mut_ptr() as u64, len: len as u64 };
        host.launch("add", threads(len), &add);
        let expected: Vec<f32> = before.iter().zip(&values).map(|(a, b)| a + b).collect();
        assert_eq!(bits(&sum), bits(&expected), "{len} elements");
    }
}

#[test]
fn a_digest_changes_with_each_bit_position_and_start() {
    let host = Host::compile();
    let whole = numbers(1500, 5);
    let digest = host.digest(&whole, 64);
    assert_eq!(digest, host.digest(&whole, 64));
    assert_ne!(digest, host.digest(&whole, 65));
    assert_ne!(digest, host.digest(&whole[..1499], 64));
    for (at, bit) in [(0, 0), (1, 31), (733, 22), (1024, 1), (1499, 5)] {
        let mut other = whole.clone();
        other[at] = f32::from_bits(other[at].to_bits() ^ (1 << bit));
        assert_ne!(digest, host.digest(&other, 64), "bit {bit} of element {at}");
    }
    let mut other = whole;
    other.swap(3, 1200);
    assert_ne!(digest, host.digest(&other, 64));
    assert_eq!(host.digest(&[], 0), 0);
}

#[test]
fn a_digest_is_a_sum_over_elements_in_any_order() {
    let host = Host::compile();
    let hash = |(at, value): (usize, &f32)| {
        let z = u64::from(value.to_bits());
        let z = z.wrapping_add((at as u64 + 65).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    for len in [1, 7 * BLOCK, 8 * BLOCK, 8 * BLOCK + 1, LEN, 17 * FOLD_THREADS_MAX + 3] {
        let values = numbers(len, 6);
        let expected = values.iter().enumerate().map(hash).fold(0, u64::wrapping_add);
        assert_eq!(host.digest(&values, 64), expected, "{len} elements");
    }
}

#[test]
fn the_number_of_threads_is_bounded_and_depends_on_the_length() {
    for (len, expected) in
        [(0, 256), (1, 256), (1024, 256), (1025, 512), (LEN, 1280), (1 << 30, THREADS_MAX)]
    {
        assert_eq!(threads(len), expected, "{len} elements");
    }
    for (len, expected) in [(0, 256), (2048, 256), (2049, 512), (1 << 30, FOLD_THREADS_MAX)] {
        assert_eq!(fold_threads(len), expected, "{len} elements");
    }
}

#[test]
fn kernels_on_a_device_compute_the_same() {
    elasticdl_stand_ins::load();
    let device = Device::open(0).unwrap();
    let stream = device.stream();
    let mut kernels = Kernels::new(&device).unwrap();
    let sgd = Sgd::new(0.1);
    let adam_w = Optimizer::from(AdamW::new(0.003).weight_decay(0.1));
    for (optimizer, is_clipped) in [
        (Optimizer::from(sgd), false),
        (sgd.momentum(0.9).into(), false),
        (sgd.momentum(0.9).nesterov().into(), false),
        (adam_w, false),
        (Optimizer::from(sgd).clip_norm(0.5), true),
        (adam_w.clip_norm(0.5), true),
    ] {
        let mut on_cpu = (numbers(LEN, 1), vec![0.0; optimizer.slots() * LEN]);
        let mut parameters = stream.clone_htod(&on_cpu.0).unwrap();
        let mut slots = stream.alloc_zeros::<f32>(on_cpu.1.len().max(1)).unwrap();
        for step in 0..3 {
            let sum = numbers(LEN, 10 + step);
            let on_device = stream.clone_htod(&sum).unwrap();
            kernels
                .apply(
                    &optimizer,
                    (step, 7, Condition::Always),
                    &on_device,
                    (&mut parameters, &mut slots),
                )
                .unwrap();
            let (parameters, slots) = (&mut on_cpu.0[..], &mut on_cpu.1[..]);
            optimizer.apply(Update::new(step, 7, &sum, parameters, slots));
        }
        let (parameters, slots) =
            (stream.clone_dtoh(&parameters).unwrap(), stream.clone_dtoh(&slots).unwrap());
        stream.synchronize().unwrap();
        if !is_clipped {
            assert_eq!(bits(&parameters), bits(&on_cpu.0), "{optimizer:?}");
            assert_eq!(bits(&slots[..on_cpu.1.len()]), bits(&on_cpu.1), "{optimizer:?}");
        }
        for (found, expected) in parameters.iter().zip(&on_cpu.0) {
            assert!((found - expected).abs() < 1e-6, "{optimizer:?}: {found} is not {expected}");
        }
    }
    let wide = [&numbers(LEN, 3)[..], &[f32::MAX, f32::NEG_INFINITY, f32::NAN, 1e-41]].concat();
    let values = stream.clone_htod(&wide).unwrap();
    let mut rounded = stream.alloc_zeros::<bf16>(wide.len()).unwrap();
    let mut back = stream.alloc_zeros::<f32>(wide.len()).unwrap();
    kernels.round_to_bf16(&values.as_view(), &mut rounded.as_view_mut()).unwrap();
    kernels.widen_bf16(&rounded.as_view(), &mut back.as_view_mut()).unwrap();
    let expected: Vec<f32> = wide.iter().map(|value| bf16::from_f32(*value).to_f32()).collect();
    assert_eq!(bits(&stream.clone_dtoh(&back).unwrap()), bits(&expected));
    let host = Host::compile();
    let (first, second) = (numbers(LEN, 1), numbers(300, 2));
    let slices = [stream.clone_htod(&first).unwrap(), stream.clone_htod(&second).unwrap()];
    kernels.begin_digests([slices[0].as_view(), slices[1].as_view()], [0, 77]).unwrap();
    // Work that does not end, as a backward pass before its end.
    let held = elasticdl_stand_ins::Hold::on(stream.cu_stream().cast());
    assert_eq!(kernels.end_digests().unwrap(), [host.digest(&first, 0), host.digest(&second, 77)]);
    drop(held);
    for bad in [None, Some(f32::NAN), Some(f32::NEG_INFINITY)] {
        let mut values = first.clone();
        *values.last_mut().unwrap() = bad.unwrap_or(f32::MAX);
        let slice = stream.clone_htod(&values).unwrap();
        kernels.begin_check(&slice).unwrap();
        let held = elasticdl_stand_ins::Hold::on(stream.cu_stream().cast());
        assert_eq!(kernels.end_check().unwrap(), bad.is_none(), "{bad:?}");
        drop(held);
    }
    kernels.begin_digests([slices[0].slice(..0), slices[1].slice(5..)], [0, 5]).unwrap();
    assert_eq!(kernels.end_digests().unwrap(), [0, host.digest(&second[5..], 5)]);
}

#[test]
fn an_update_changes_nothing_if_the_check_before_it_finds_a_nan() {
    elasticdl_stand_ins::load();
    let device = Device::open(0).unwrap();
    let stream = device.stream();
    let mut kernels = Kernels::new(&device).unwrap();
    let sgd = Sgd::new(0.1);
    let adam_w = Optimizer::from(AdamW::new(0.003).weight_decay(0.1));
    for optimizer in [
        Optimizer::from(sgd),
        sgd.momentum(0.9).into(),
        sgd.momentum(0.9).nesterov().into(),
        adam_w,
        adam_w.clip_norm(0.5),
    ] {
        let mut parameters = stream.clone_htod(&numbers(LEN, 1)).unwrap();
        let mut slots = stream.clone_htod(&numbers(2 * LEN, 2)).unwrap();
        let on_host = |slices: [&CudaSlice<f32>; 2]| {
            slices.map(|slice| bits(&stream.clone_dtoh(slice).unwrap()))
        };
        let before = on_host([&parameters, &slots]);
        for bad in [true, false] {
            let mut sum = numbers(LEN, 3);
            sum[LEN - 1] = if bad { f32::NAN } else { 1.0 };
            let sum = stream.clone_htod(&sum).unwrap();
            kernels.begin_check(&sum).unwrap();
            let when = (0, 7, Condition::CheckedIsFinite);
            kernels.apply(&optimizer, when, &sum, (&mut parameters, &mut slots)).unwrap();
            assert_eq!(kernels.end_check().unwrap(), !bad);
            assert_eq!(on_host([&parameters, &slots]) == before, bad, "{optimizer:?}");
        }
    }
}
