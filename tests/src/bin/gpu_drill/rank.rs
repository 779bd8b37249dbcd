//! The process of one rank: executes the commands on standard input, one line of JSON each, and
//! answers likewise.

use std::io::{BufRead, Write, stdin, stdout};
use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cudarc::driver::CudaSlice;
use elasticdl::device::layer_times::{OperationTimes, layer_times};
use elasticdl_collective::device::{Device, DeviceGroup, NcclOptions, NcclPolicy, Path};
use elasticdl_collective::exit_at_once;
use elasticdl_collective::nccl::{NcclState, UniqueId, wait_for_release};
use elasticdl_collective::testing::{CopyBandwidth, RawCommunicator};
use elasticdl_collective::{
    Communicator, Endpoint, EndpointOptions, Fence, GroupSpec, Member, Secret,
};
use elasticdl_tests::quantile;
use serde_json::{Value, json};

use crate::processes::now;
use crate::{Arguments, Fallible, libraries};

/// The state of a rank between two commands.
struct Rank {
    endpoint: Endpoint,
    device: Device,
    policy: NcclPolicy,
    ring: Option<DeviceGroup>,
    bare: Option<RawCommunicator>,
    buffers: Option<(CudaSlice<f32>, CudaSlice<f32>)>,
    /// Waits for NCCL's release since the end of a group whose communicator was aborted.
    released: Option<JoinHandle<Option<Value>>>,
}

/// Executes commands until standard input ends.
pub(crate) fn serve(rank_index: u64, arguments: &Arguments) -> ExitCode {
    let mut rank = match Rank::open(rank_index, arguments) {
        Ok(rank) => rank,
        Err(error) => {
            print_answer(&json!({ "error": describe(&*error) }));
            return ExitCode::FAILURE;
        }
    };
    let devices = Device::count().unwrap_or(0);
    let address = rank.endpoint.address().to_string();
    print_answer(&json!({ "address": address, "devices": devices }));
    let (read, commands) = mpsc::channel();
    let fence = rank.endpoint.fence();
    thread::spawn(move || listen(&fence, &read));
    for command in commands {
        if command["do"] == "exit" {
            drop(rank);
            print_answer(&json!({}));
            // As a worker ends.
            if !wait_for_release(Duration::from_secs(5)) {
                exit_at_once(1);
            }
            return ExitCode::SUCCESS;
        }
        let answer = rank.perform(&command);
        print_answer(&answer.unwrap_or_else(|error| json!({ "error": describe(&*error) })));
    }
    ExitCode::SUCCESS
}

/// Reads commands. The end of a generation takes effect during another command.
fn listen(fence: &Fence, read: &mpsc::Sender<Value>) {
    for line in stdin().lock().lines().map_while(Result::ok) {
        let command: Value = serde_json::from_str(&line).unwrap_or_default();
        match command["over"].as_u64() {
            Some(generation) => fence.abort_before(generation + 1),
            None if read.send(command).is_err() => return,
            None => {}
        }
    }
}

impl Rank {
    fn open(rank_index: u64, arguments: &Arguments) -> Fallible<Self> {
        let device = Device::open(arguments.ordinal)?;
        let options = EndpointOptions::new("gpu_drill", rank_index, Secret::new("gpu_drill"));
        let endpoint = Endpoint::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), options)?;
        Ok(Self {
            endpoint,
            device,
            policy: match &arguments.nccl {
                None => NcclPolicy::auto(),
                Some(file) => NcclPolicy::from_file(file),
            },
            ring: None,
            bare: None,
            buffers: None,
            released: None,
        })
    }

    fn perform(&mut self, command: &Value) -> Fallible<Value> {
        let number = |name: &str| command[name].as_u64().unwrap_or(0);
        let path = if command["path"] == "nccl" { Path::Nccl } else { Path::Host };
        let bytes = number("bytes") as usize;
        match command["do"].as_str().unwrap_or("") {
            "machine" => self.machine(bytes),
            "layer" => self.layer(bytes, number("iterations") as usize),
            "connect" => self.connect(command),
            "begin" => self.begin(number("init_ms"), number("abort_ms")).map(|()| json!({})),
            "settle" => self.settle(),
            "released" => self.released(),
            "nccl" => self.build(number("init_ms"), number("abort_ms")),
            "memory" => self.memory(),
            "bare" => self.make_bare(),
            "sum" => self.sum(bytes, number("iterations"), path),
            "beside" => self.beside(bytes, number("iterations")),
            "host" => self.host(bytes, number("iterations")),
            "until_lost" => self.until_lost(bytes, path),
            "intact" => self.intact(),
            other => Err(format!("unknown command {other}").into()),
        }
    }

    /// Properties of the machine, and its copy rates.
    fn machine(&self, bytes: usize) -> Fallible<Value> {
        let CopyBandwidth { to_device, to_host, both, within } =
            CopyBandwidth::measure(&self.device, bytes)?;
        let (nccl, off) = match &self.policy {
            NcclPolicy::On(library, _) => (library.version(), None),
            NcclPolicy::Off(reason) => (0, Some(format!("NCCL is off: {reason}"))),
        };
        let mut libraries = libraries::describe(self.device.stream().context());
        libraries.extend(off);
        let name = self.device.stream().context().name().unwrap_or_default();
        let rates = [to_device, to_host, both, within].map(|rate| rate / 1e9);
        Ok(json!({ "name": name, "nccl": nccl, "rates": rates, "libraries": libraries }))
    }

    /// The times of the layer's operations in each step.
    fn layer(&self, bytes: usize, repetitions: usize) -> Fallible<Value> {
        let measured = layer_times(&self.device, bytes / size_of::<f32>(), repetitions)?;
        let to_host = CopyBandwidth::measure(&self.device, bytes)?.to_host;
        let answer = |mut times: OperationTimes| {
            let host = (!times.on_host.is_empty()).then(|| quantile(&mut times.on_host, 0.5));
            let s = quantile(&mut times.on_device, 0.5);
            json!({ "name": times.name, "bytes": times.bytes, "s": s, "host_s": host })
        };
        let operations: Vec<Value> = measured.into_iter().map(answer).collect();
        Ok(json!({ "to_host": to_host, "operations": operations }))
    }

    fn connect(&mut self, command: &Value) -> Fallible<Value> {
        self.leave();
        let member = |pair: &Value| {
            let (id, address) = (pair[0].as_u64()?, pair[1].as_str()?.parse().ok()?);
            Some(Member { id, address })
        };
        let members = command["members"].as_array().ok_or("no members")?;
        let members =
            members.iter().map(member).collect::<Option<Vec<_>>>().ok_or("no list of members")?;
        let generation = command["generation"].as_u64().ok_or("no generation")?;
        self.endpoint.fence().abort_before(generation);
        let ring =
            self.endpoint.connect(&GroupSpec { generation, members }, Duration::from_secs(20))?;
        self.ring = Some(DeviceGroup::new(ring, self.device.clone()));
        Ok(json!({}))
    }

    /// Ends the group.
    fn leave(&mut self) {
        self.bare = None;
        let Some(ring) = self.ring.take() else { return };
        let is_aborted = matches!(ring.nccl_state(), NcclState::Building | NcclState::Failed(_));
        let begun = Instant::now();
        drop(ring);
        if is_aborted {
            self.released = Some(thread::spawn(move || {
                let is_released = wait_for_release(RELEASE_TIME_MAX);
                is_released.then(|| json!({ "s": begun.elapsed().as_secs_f64(), "at": now() }))
            }));
        }
    }

    /// Begins to build an NCCL communicator, as a group does.
    fn begin(&mut self, init_ms: u64, abort_ms: u64) -> Fallible<()> {
        let options = NcclOptions {
            init_timeout: Duration::from_millis(init_ms),
            abort_timeout: Duration::from_millis(abort_ms),
            on_shared_gpus: true,
        };
        if let NcclPolicy::On(_, current) = &mut self.policy {
            *current = options;
        }
        Ok(self.ring.as_mut().ok_or("no group")?.begin_nccl(&self.policy)?)
    }

    /// Builds an NCCL communicator, and reports the time.
    fn build(&mut self, init_ms: u64, abort_ms: u64) -> Fallible<Value> {
        let begun = Instant::now();
        self.begin(init_ms, abort_ms)?;
        let ring = self.ring.as_ref().ok_or("no group")?;
        loop {
            match ring.nccl_state() {
                NcclState::Building => thread::sleep(Duration::from_millis(1)),
                NcclState::Ready => {
                    return Ok(json!({ "s": begun.elapsed().as_secs_f64(), "at": now() }));
                }
                NcclState::Absent(reason) | NcclState::Failed(reason) => return Err(reason.into()),
            }
        }
    }

    /// Waits until an initialization has failed and NCCL has released its communicator, and reports
    /// why it failed and how long the release took.
    fn settle(&self) -> Fallible<Value> {
        let ring = self.ring.as_ref().ok_or("no group")?;
        let until = Instant::now() + RELEASE_TIME_MAX;
        while Instant::now() < until {
            match (ring.nccl_state(), ring.nccl_abort_time()) {
                (NcclState::Failed(reason), Some(took)) => {
                    let abort_ms = took.as_secs_f64() * 1e3;
                    return Ok(json!({ "state": reason, "abort_ms": abort_ms }));
                }
                (NcclState::Absent(reason), _) => return Err(reason.into()),
                (NcclState::Ready, _) => return Err("NCCL is ready without all ranks".into()),
                _ => thread::sleep(Duration::from_millis(1)),
            }
        }
        Err("NCCL has not released a communicator that was aborted".into())
    }

    /// Reports the time from the end of the last group to NCCL's release, and when that was.
    fn released(&mut self) -> Fallible<Value> {
        let Some(waits) = self.released.take() else { return Ok(json!({ "s": 0.0, "at": 0 })) };
        let released = waits.join().map_err(|_| "the thread that waits for NCCL has panicked")?;
        released.ok_or_else(|| "NCCL has not released its communicator".into())
    }

    /// The memory of this rank's GPU that is in use, by all processes.
    fn memory(&self) -> Fallible<Value> {
        let (free, total) = self.device.stream().context().mem_get_info()?;
        Ok(json!({ "used": total - free }))
    }

    /// Builds a second communicator without the layers above NCCL.
    fn make_bare(&mut self) -> Fallible<Value> {
        let (Some(ring), NcclPolicy::On(library, _)) = (&mut self.ring, &self.policy) else {
            return Err("no group, or no NCCL".into());
        };
        let mut id = Vec::new();
        if ring.host().rank() == 0 {
            id = library.unique_id()?.as_bytes().to_vec();
        }
        ring.host_mut().broadcast_bytes(0, &mut id)?;
        let id = UniqueId::from_bytes(&id).ok_or("no unique id")?;
        let place = (ring.host().rank(), ring.host().world_size());
        self.bare = Some(RawCommunicator::new(library, &id, place, self.device.stream())?);
        Ok(json!({}))
    }

    /// Allocates buffers of this many bytes; the source is all ones.
    fn prepare(&mut self, bytes: usize) -> Fallible<()> {
        let len = bytes / size_of::<f32>();
        if self.buffers.as_ref().is_none_or(|(src, _)| src.len() != len) {
            self.buffers = None;
            let stream = self.device.stream();
            self.buffers =
                Some((stream.clone_htod(&vec![1.0_f32; len])?, stream.alloc_zeros(len)?));
        }
        Ok(())
    }

    /// All-reduces over a path: reports the median time and checks the result.
    fn sum(&mut self, bytes: usize, iterations: u64, path: Path) -> Fallible<Value> {
        self.prepare(bytes)?;
        let (ring, buffers) = (self.ring.as_mut(), self.buffers.as_mut());
        let (ring, (src, dst)) = ring.zip(buffers).ok_or("no group")?;
        let mut times = Vec::new();
        for _ in 0..iterations {
            ring.host_mut().all_gather(&[])?;
            let begun = Instant::now();
            ring.all_reduce_device(&[], src, dst, path)?;
            self.device.stream().synchronize()?;
            times.push(begun.elapsed().as_secs_f64());
        }
        let at = now();
        check(&self.device, dst, ring.host().world_size())?;
        Ok(json!({ "s": quantile(&mut times, 0.5), "at": at }))
    }

    /// The same all-reduce by this layer and by NCCL alone, in turn: reports both medians.
    fn beside(&mut self, bytes: usize, iterations: u64) -> Fallible<Value> {
        self.prepare(bytes)?;
        let all = self.ring.as_mut().zip(self.bare.as_ref()).zip(self.buffers.as_mut());
        let ((ring, bare), (src, dst)) = all.ok_or("no group, or no NCCL")?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..iterations {
            ring.host_mut().all_gather(&[])?;
            let begun = Instant::now();
            ring.all_reduce_device(&[], src, dst, Path::Nccl)?;
            ours.push(begun.elapsed().as_secs_f64());
            ring.host_mut().all_gather(&[])?;
            let begun = Instant::now();
            bare.all_reduce(src, dst)?;
            theirs.push(begun.elapsed().as_secs_f64());
        }
        check(&self.device, dst, ring.host().world_size())?;
        Ok(json!({ "s": quantile(&mut ours, 0.5), "bare_s": quantile(&mut theirs, 0.5) }))
    }

    /// All-reduces over the host's ring, in host memory.
    fn host(&mut self, bytes: usize, iterations: u64) -> Fallible<Value> {
        let ring = self.ring.as_mut().ok_or("no group")?;
        let src = vec![1.0; bytes / size_of::<f32>()];
        let mut dst = vec![0.0; src.len()];
        let mut times = Vec::new();
        for _ in 0..iterations {
            ring.host_mut().all_gather(&[])?;
            let begun = Instant::now();
            ring.host_mut().all_reduce(&[], &src, &mut dst)?;
            times.push(begun.elapsed().as_secs_f64());
        }
        Ok(json!({ "s": quantile(&mut times, 0.5) }))
    }

    /// All-reduces until the group fails, and reports when the error occurred.
    fn until_lost(&mut self, bytes: usize, path: Path) -> Fallible<Value> {
        self.prepare(bytes)?;
        let (ring, buffers) = (self.ring.as_mut(), self.buffers.as_mut());
        let (ring, (src, dst)) = ring.zip(buffers).ok_or("no group")?;
        loop {
            match ring.all_reduce_device(&[], src, dst, path) {
                Ok(_) => print_answer(&json!({ "turn": now() })),
                Err(error) => {
                    let at = now();
                    return Ok(json!({ "lost": describe(&error), "at": at }));
                }
            }
        }
    }

    /// Checks that the source has not changed.
    fn intact(&self) -> Fallible<Value> {
        let (src, _) = self.buffers.as_ref().ok_or("no buffers")?;
        let source = self.device.stream().clone_dtoh(src)?;
        self.device.stream().synchronize()?;
        let changed = source.iter().any(|element| *element != 1.0);
        if changed { Err("a source has changed".into()) } else { Ok(json!({})) }
    }
}

/// Checks that every element is the sum of all ranks' ones.
fn check(device: &Device, dst: &CudaSlice<f32>, world: usize) -> Fallible<()> {
    let sums = device.stream().clone_dtoh(dst)?;
    device.stream().synchronize()?;
    match sums.iter().position(|sum| *sum != world as f32) {
        None => Ok(()),
        Some(index) => Err(format!("element {index} is {}; expected {world}", sums[index]).into()),
    }
}

fn describe(error: &dyn std::error::Error) -> String {
    let mut describe = error.to_string();
    let mut cause = error.source();
    while let Some(deeper) = cause {
        describe += &format!(": {deeper}");
        cause = deeper.source();
    }
    describe
}

/// A reader that is gone needs no answer.
fn print_answer(answer: &Value) {
    let mut output = stdout().lock();
    let _ = writeln!(output, "{answer}");
    let _ = output.flush();
}

const RELEASE_TIME_MAX: Duration = Duration::from_secs(30);
