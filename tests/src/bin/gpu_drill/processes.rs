//! The processes of the ranks, as the drill controls them.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::{Drill, Fallible, LIBRARY_PATH};

/// A group of processes. Those that are still running when this is dropped are killed.
pub(crate) struct Ranks {
    ranks: Vec<Rank>,
    /// Timeout of an answer.
    timeout: Duration,
    /// Number of GPUs that a rank sees.
    devices: usize,
}

struct Rank {
    id: u64,
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    address: String,
}

/// How the processes of a group start.
#[derive(Clone, Copy, Default)]
struct Setup {
    /// All on the first GPU.
    shared: bool,
    /// The initialization of NCCL fails at once on the last rank.
    without_nccl_of_last: bool,
}

impl Ranks {
    /// Starts the processes. `shared`: all on the first GPU; otherwise on a GPU each, as far as
    /// there are enough.
    pub(crate) fn start(drill: &Drill, world: usize, shared: bool) -> Fallible<Self> {
        Self::spawn(drill, world, Setup { shared, ..Setup::default() })
    }

    /// Starts processes of which the last one never comes to the initialization of NCCL, although
    /// it has agreed to it.
    pub(crate) fn start_without_nccl_of_last(drill: &Drill, world: usize) -> Fallible<Self> {
        Self::spawn(drill, world, Setup { without_nccl_of_last: true, ..Setup::default() })
    }

    fn spawn(drill: &Drill, world: usize, setup: Setup) -> Fallible<Self> {
        let shared = setup.shared;
        let timeout = ANSWER_TIMEOUT.min(drill.left());
        let mut ranks = Self { ranks: Vec::new(), timeout, devices: 0 };
        for id in 0..world as u64 {
            let ordinal = if shared { 0 } else { id as usize % drill.devices.max(1) };
            let mut command = Command::new(env::current_exe()?);
            command.args(["--rank", &id.to_string(), "--ordinal", &ordinal.to_string()]);
            if let Some(path) = drill.library_path()? {
                command.env(LIBRARY_PATH, path).env("STAND_IN_CHECKS_EXIT", "1");
            }
            if shared || world > drill.devices {
                command.env("NCCL_HOSTID", format!("drill-{id}")).envs(ONE_GPU);
            }
            if setup.without_nccl_of_last && id as usize + 1 == world {
                match &drill.arguments.stand_in {
                    Some(folder) => {
                        command.arg("--nccl").arg(folder.join("libnccl.init_fails.so"));
                    }
                    // NCCL finds no network interface of this name.
                    None => {
                        command.env("NCCL_SOCKET_IFNAME", "=absent");
                    }
                }
            }
            // NCCL writes to standard output by default, which carries the answers.
            for (name, value) in [("NCCL_DEBUG", "WARN"), ("NCCL_DEBUG_FILE", "/dev/stderr")] {
                if env::var_os(name).is_none() {
                    command.env(name, value);
                }
            }
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            let (sender, lines) = mpsc::channel();
            let output = BufReader::new(child.stdout.take().expect("it is piped"));
            thread::spawn(move || {
                let lines = output.lines().map_while(Result::ok);
                // A library may write there, too.
                lines.filter(|line| line.starts_with('{')).try_for_each(|line| sender.send(line))
            });
            let input = child.stdin.take().expect("it is piped");
            ranks.ranks.push(Rank { id, child, input, lines, address: String::new() });
        }
        for index in 0..world {
            let hello = ranks.answer(index)?;
            ranks.devices = hello["devices"].as_u64().unwrap_or(0) as usize;
            hello["address"]
                .as_str()
                .ok_or("a rank printed no address")?
                .clone_into(&mut ranks.ranks[index].address);
        }
        Ok(ranks)
    }

    /// Timeout of an answer.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn devices(&self) -> usize {
        self.devices
    }

    /// Waits until all processes have ended. Fails if one has not ended well.
    pub(crate) fn wait_for_ends(mut self) -> Fallible<()> {
        let until = Instant::now() + self.timeout;
        for rank in &mut self.ranks {
            let status = loop {
                match rank.child.try_wait()? {
                    Some(status) => break status,
                    None if Instant::now() > until => return Err("a process does not end".into()),
                    None => thread::sleep(Duration::from_millis(1)),
                }
            };
            if !status.success() {
                return Err(format!("the process of rank {} ended with {status}", rank.id).into());
            }
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Sends all ranks the same command, and returns their answers in rank order.
    pub(crate) fn all(&mut self, command: &Value) -> Fallible<Vec<Value>> {
        (0..self.len()).try_for_each(|index| self.send(index, command))?;
        (0..self.len()).map(|index| self.answer(index)).collect()
    }

    /// Builds a group of the ranks that are left.
    pub(crate) fn connect(&mut self, generation: u64) -> Fallible<()> {
        let members: Vec<_> =
            self.ranks.iter().map(|rank| json!([rank.id, rank.address])).collect();
        self.all(&json!({ "do": "connect", "generation": generation, "members": members }))
            .map(drop)
    }

    pub(crate) fn send(&mut self, index: usize, command: &Value) -> Fallible<()> {
        let input = &mut self.ranks[index].input;
        writeln!(input, "{command}").and_then(|()| input.flush())?;
        Ok(())
    }

    pub(crate) fn answer(&self, index: usize) -> Fallible<Value> {
        let line = self.ranks[index]
            .lines
            .recv_timeout(self.timeout)
            .map_err(|_| format!("rank {index} did not answer within {:?}", self.timeout))?;
        let answer: Value = serde_json::from_str(&line)?;
        match answer["error"].as_str() {
            Some(error) => Err(format!("rank {index}: {error}").into()),
            None => Ok(answer),
        }
    }

    /// Sends a signal, and returns the time.
    pub(crate) fn signal(&self, index: usize, signal: Signal) -> Fallible<u64> {
        let pid = i32::try_from(self.ranks[index].child.id())?;
        let at = now();
        kill_process(Pid::from_raw(pid).ok_or("no such process")?, signal)?;
        Ok(at)
    }

    /// Removes a rank from the group.
    pub(crate) fn remove(&mut self, index: usize) {
        drop(self.ranks.remove(index));
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // A process that has ended already is only reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Nanoseconds by a clock that all processes of a machine share.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// For ranks that share a GPU: NCCL treats them as ranks on different hosts, and uses few resources
/// for each.
pub(crate) const ONE_GPU: [(&str, &str); 7] = [
    ("NCCL_IB_DISABLE", "1"),
    ("NCCL_MAX_NCHANNELS", "1"),
    ("NCCL_MNNVL_ENABLE", "0"),
    ("NCCL_NET", "Socket"),
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_SHM_DISABLE", "1"),
    ("NCCL_SOCKET_IFNAME", "lo"),
];

const ANSWER_TIMEOUT: Duration = Duration::from_secs(90);
