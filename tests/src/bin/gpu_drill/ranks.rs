//! The ranks' processes, as the drill sees them.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::{Drill, Fallible};

/// A group of processes. Those that still run when this is dropped are killed.
pub(crate) struct Ranks {
    ranks: Vec<Rank>,
    /// How long an answer may take.
    patience: Duration,
}

struct Rank {
    id: u64,
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    address: String,
}

impl Ranks {
    /// `shared`: all on the first GPU; otherwise each has its own, as far as there are.
    pub(crate) fn start(drill: &Drill, world: usize, shared: bool) -> Fallible<Self> {
        let patience = PATIENCE.min(drill.left());
        let mut ranks = Self { ranks: Vec::new(), patience };
        for id in 0..world as u64 {
            let ordinal = if shared { 0 } else { id as usize % drill.devices.max(1) };
            let mut command = Command::new(env::current_exe()?);
            command.args(["--rank", &id.to_string(), "--ordinal", &ordinal.to_string()]);
            if let Some(folder) = &drill.arguments.stand_in {
                let mut paths = vec![folder.clone()];
                paths.extend(env::var_os("LD_LIBRARY_PATH").iter().flat_map(env::split_paths));
                command.env("LD_LIBRARY_PATH", env::join_paths(paths)?);
            }
            if shared || world > drill.devices {
                command.env("NCCL_HOSTID", format!("drill-{id}")).envs(ONE_GPU);
            }
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            let (said, lines) = mpsc::channel();
            let output = BufReader::new(child.stdout.take().expect("it is piped"));
            thread::spawn(move || {
                output.lines().map_while(Result::ok).try_for_each(|line| said.send(line))
            });
            let input = child.stdin.take().expect("it is piped");
            ranks.ranks.push(Rank { id, child, input, lines, address: String::new() });
        }
        for index in 0..world {
            let hello = ranks.answer(index)?;
            hello["address"]
                .as_str()
                .ok_or("a rank said no address")?
                .clone_into(&mut ranks.ranks[index].address);
        }
        Ok(ranks)
    }

    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Has all do the same, and gives their answers in order.
    pub(crate) fn all(&mut self, command: &Value) -> Fallible<Vec<Value>> {
        (0..self.len()).try_for_each(|index| self.tell(index, command))?;
        (0..self.len()).map(|index| self.answer(index)).collect()
    }

    /// Has those that are there build a group.
    pub(crate) fn connect(&mut self, generation: u64) -> Fallible<()> {
        let members: Vec<_> =
            self.ranks.iter().map(|rank| json!([rank.id, rank.address])).collect();
        self.all(&json!({ "do": "connect", "generation": generation, "members": members }))
            .map(drop)
    }

    pub(crate) fn tell(&mut self, index: usize, command: &Value) -> Fallible<()> {
        let input = &mut self.ranks[index].input;
        writeln!(input, "{command}").and_then(|()| input.flush())?;
        Ok(())
    }

    pub(crate) fn answer(&self, index: usize) -> Fallible<Value> {
        let line = self.ranks[index]
            .lines
            .recv_timeout(self.patience)
            .map_err(|_| format!("rank {index} did not answer within {:?}", self.patience))?;
        let answer: Value = serde_json::from_str(&line)?;
        match answer["error"].as_str() {
            Some(error) => Err(format!("rank {index}: {error}").into()),
            None => Ok(answer),
        }
    }

    /// Sends a signal, and says when.
    pub(crate) fn signal(&self, index: usize, signal: Signal) -> Fallible<u64> {
        let pid = i32::try_from(self.ranks[index].child.id())?;
        let at = now();
        kill_process(Pid::from_raw(pid).ok_or("no such process")?, signal)?;
        Ok(at)
    }

    /// It takes part no more.
    pub(crate) fn remove(&mut self, index: usize) {
        drop(self.ranks.remove(index));
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // One that has ended already is only reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Nanoseconds by a clock that all processes of a machine share.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// For ranks that share a GPU: NCCL takes them for different hosts', and each for one with few
/// resources.
const ONE_GPU: [(&str, &str); 6] = [
    ("NCCL_IB_DISABLE", "1"),
    ("NCCL_MAX_NCHANNELS", "1"),
    ("NCCL_NET", "Socket"),
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_SHM_DISABLE", "1"),
    ("NCCL_SOCKET_IFNAME", "lo"),
];

const PATIENCE: Duration = Duration::from_secs(90);
