//! Operations on device memory, on both data paths.
#![allow(unsafe_code, reason = "memory that is known by its address")]

use cudarc::driver::{CudaContext, CudaSlice, DevicePtr as _, DevicePtrMut as _};
use elasticdl_collective::device::{Buffers, CallKind, Device, DeviceError, Dtype, Element, Path};
use elasticdl_collective::nccl::NcclState;
use elasticdl_collective::{CollectiveError, Communicator};
use half::{bf16, f16};

use crate::group::{Gpu, group, nccl, on_all};

/// Runs `act` on both paths, in groups of 1 to 3 ranks.
fn everywhere(act: impl Fn(&mut Gpu, Path) + Sync) {
    let nccl = nccl("");
    for world in 1..=3 {
        let mut group = group(world);
        on_all(&mut group, |gpu| act(gpu, Path::Host));
        on_all(&mut group, |gpu| {
            gpu.ring.begin_nccl(&nccl).unwrap();
            assert_eq!(gpu.wait_for_nccl(), NcclState::Ready);
        });
        on_all(&mut group, |gpu| act(gpu, Path::Nccl));
        // The host path stays available.
        on_all(&mut group, |gpu| act(gpu, Path::Host));
    }
}

/// Contribution of a rank: small whole numbers, exact in all types and in any order.
fn part<T: Element>(rank: usize, len: usize) -> Vec<T> {
    (0..len)
        .map(|index| T::round(((index * 7 + index / 1009 + rank * 5) % 16) as f32 - 8.0))
        .collect()
}

/// Returns a buffer that holds these numbers only after the work on the device's stream is
/// complete.
fn written<T: Element>(gpu: &Gpu, numbers: &[T]) -> CudaSlice<T> {
    let there = gpu.put(numbers).unwrap();
    let mut buffer = gpu.put(&vec![T::round(77.0); numbers.len()]).unwrap();
    gpu.ring.device().stream().memcpy_dtod(&there, &mut buffer).unwrap();
    buffer
}

#[test]
fn memory_that_is_not_page_locked_is_copied_in_the_order_of_the_stream() {
    const BLOCK: usize = 1 << 20;
    let mut group = group(1);
    on_all(&mut group, |gpu| {
        let device = gpu.ring.device().clone();
        for len in [1, BLOCK, BLOCK + 1, 4 * BLOCK - 3] {
            let mine = part::<f32>(1, len);
            let (there, mut copy) = (written(gpu, &mine), vec![9.0; len]);
            device.copy_to_host(&there, &mut copy).unwrap();
            assert_eq!(copy, mine);
            let mut into = written(gpu, &part::<f32>(2, len));
            let stream = device.stream().clone();
            // All of it fits into the page-locked memory while the stream is busy.
            let held =
                (len < 2 * BLOCK).then(|| elasticdl_stand_ins::Hold::on(stream.cu_stream().cast()));
            device.copy_to_device(&copy, &mut into).unwrap();
            drop((copy, held));
            assert_eq!(stream.clone_dtoh(&into).unwrap(), mine);
        }
    });
}

fn sums<T: Element>(gpu: &mut Gpu, path: Path, len: usize) {
    let (rank, world) = (gpu.ring.host().rank(), gpu.ring.host().world_size());
    let mine = part::<T>(rank, len);
    let (src, mut dst) = (written(gpu, &mine), written(gpu, &part::<T>(9, len)));
    let header = vec![rank as u8; rank];
    let (from, mut to) = (src.slice(..len), dst.slice_mut(..len));
    let before = elasticdl_stand_ins::bytes_copied();
    let headers = gpu.ring.all_reduce_device(&header, &from, &mut to, path).unwrap();
    // Over NCCL, and with one rank, no data leaves the device; otherwise it is copied out and in
    // once.
    let is_local = path == Path::Nccl || world == 1;
    let bytes = if is_local { 0 } else { 2 * len * size_of::<T>() };
    assert_eq!(
        elasticdl_stand_ins::bytes_copied() - before,
        bytes as u64,
        "{path:?}, world {world}"
    );
    assert_eq!(headers, (0..world).map(|rank| vec![rank as u8; rank]).collect::<Vec<_>>());
    let parts: Vec<_> = (0..world).map(|rank| part::<T>(rank, len)).collect();
    let sum = |index: usize| parts.iter().map(|part| part[index].widen()).sum::<f32>();
    let got = gpu.get(&dst, len);
    let wrong = (0..len).find(|index| got[*index].widen() != sum(*index));
    assert_eq!(wrong, None, "{:?} over {path:?}, world {world}, len {len}", T::DTYPE);
    assert!(
        gpu.get(&src, len).iter().zip(&mine).all(|(a, b)| a.widen() == b.widen()),
        "the source changed"
    );
}

fn moves<T: Element>(gpu: &mut Gpu, path: Path, len: usize) {
    let (rank, world) = (gpu.ring.host().rank(), gpu.ring.host().world_size());
    let same = |a: &[T], b: &[T]| a.iter().zip(b).all(|(a, b)| a.widen() == b.widen());
    for root in 0..world {
        let mut buf = written(gpu, &part::<T>(rank, len));
        gpu.ring.broadcast_device(root, &mut buf.slice_mut(..len), path).unwrap();
        assert!(same(&gpu.get(&buf, len), &part(root, len)), "{path:?}, world {world}, len {len}");
    }
}

#[test]
fn sums_of_all_types_are_exact() {
    everywhere(|gpu, path| {
        for len in [0, 1, 5, 20_011] {
            sums::<f32>(gpu, path, len);
            sums::<bf16>(gpu, path, len);
            sums::<f16>(gpu, path, len);
        }
        // Several blocks, the last one short.
        sums::<f32>(gpu, path, 3 * (1 << 18) + 77);
        sums::<bf16>(gpu, path, 2 * (1 << 19) + 3);
    });
}

#[test]
fn broadcasts_of_all_types_copy_the_data() {
    everywhere(|gpu, path| {
        for len in [0, 1, 3, 20_011] {
            moves::<f32>(gpu, path, len);
            moves::<bf16>(gpu, path, len);
            moves::<f16>(gpu, path, len);
        }
        moves::<f32>(gpu, path, 600_011);
    });
}

/// Performs an operation on memory that is known by its address.
fn direct<T: Element>(
    gpu: &mut Gpu,
    (kind, dtype): (CallKind, Dtype),
    (src, dst): (&[T], usize),
    len: usize,
) -> Result<Vec<T>, CollectiveError> {
    let (given, mut taken) = (written(gpu, src), gpu.put(&vec![T::round(9.0); dst])?);
    let stream = gpu.ring.device().stream().clone();
    let (src, _read) = given.device_ptr(&stream);
    let (address, written) = taken.device_ptr_mut(&stream);
    let buffers = Buffers { src, dst: address, len, dtype };
    // SAFETY: the memory has the lengths that the operations of these tests state.
    unsafe { gpu.ring.perform(kind, buffers) }?;
    drop(written);
    Ok(gpu.get(&taken, dst))
}

#[test]
fn memory_that_is_known_by_its_address_is_gathered_summed_and_divided_over_nccl() {
    let nccl = nccl("");
    let mut group = group(3);
    on_all(&mut group, |gpu| {
        assert!(!gpu.ring.wait_for_nccl().unwrap(), "it was not begun");
        gpu.ring.begin_nccl(&nccl).unwrap();
        assert!(gpu.ring.wait_for_nccl().unwrap());
        let rank = gpu.ring.host().rank();
        let parts = [0, 1, 2].map(|rank| part::<f32>(rank, 6));
        let sum: Vec<f32> = (0..6).map(|at| parts.iter().map(|part| part[at]).sum()).collect();
        let own = &parts[rank][..];
        let bytes = (CallKind::AllGather, Dtype::Byte);
        assert_eq!(direct(gpu, bytes, (own, 18), 24).unwrap(), parts.concat());
        let words = (CallKind::AllGather, Dtype::F32);
        assert_eq!(direct(gpu, words, (own, 18), 6).unwrap(), parts.concat());
        let bytes = (CallKind::Broadcast { root: 1 }, Dtype::Byte);
        assert_eq!(direct(gpu, bytes, (own, 6), 24).unwrap(), parts[1]);
        let words = (CallKind::AllReduce, Dtype::F32);
        assert_eq!(direct(gpu, words, (own, 6), 6).unwrap(), sum);
        let words = (CallKind::ReduceScatter, Dtype::F32);
        assert_eq!(direct(gpu, words, (own, 2), 2).unwrap(), sum[2 * rank..][..2]);
        let absent = CallKind::Broadcast { root: 3 };
        direct(gpu, (absent, Dtype::F32), (own, 6), 6).unwrap_err();
    });
    // What the ranks do differs.
    let errors = on_all(&mut group, |gpu| {
        let kind = match gpu.ring.host().rank() {
            0 => CallKind::AllReduce,
            _ => CallKind::Broadcast { root: 0 },
        };
        direct(gpu, (kind, Dtype::F32), (&[1.0_f32; 6], 6), 6).unwrap_err().to_string()
    });
    assert!(
        errors.iter().any(|error| error.contains("got Broadcast { root: 0 } of F32")),
        "{errors:?}"
    );
}

#[test]
fn a_default_stream_is_refused_and_freed_memory_is_kept() {
    elasticdl_stand_ins::load();
    let context = CudaContext::new(0).unwrap();
    for stream in [context.default_stream(), context.per_thread_stream()] {
        let refused = Device::from_stream(stream).unwrap_err();
        assert!(matches!(refused, DeviceError::DefaultStream), "{refused:?}");
        assert!(refused.to_string().contains("Device::new_cuda_with_stream"), "{refused}");
    }
    Device::from_stream(context.new_stream().unwrap()).unwrap();
    assert_eq!(elasticdl_stand_ins::release_threshold(), u64::MAX);
}

#[test]
fn a_missing_device_is_an_error() {
    elasticdl_stand_ins::load();
    let count = Device::count().unwrap();
    let error = Device::open(count).unwrap_err();
    let DeviceError::NoDevice { ordinal, count: seen } = error else { panic!("{error:?}") };
    assert_eq!((ordinal, seen), (count, count));
    let uuids: Vec<_> = (0..count).map(|ordinal| Device::open(ordinal).unwrap().uuid()).collect();
    assert!(uuids.windows(2).all(|pair| pair[0] != pair[1]), "two devices have one UUID");
}
