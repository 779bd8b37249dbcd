//! `--hosts`: workers on other hosts, which commands such as ssh reach, end with their connection,
//! and a host that is lost costs its workers only.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command as Process, Stdio};
use std::time::Duration;

use elasticdl_master::local::hosts::HostLaunch;
use elasticdl_tests::{Command, JobFixture, Network, Running, assert_end, send};
use rustix::process::Signal;

use crate::PROGRAMS;

/// A job whose workers are on the hosts of a list, which `command` reaches.
fn on_hosts(fixture: &JobFixture, list: &str, command: &str) -> Command {
    with_checkpoints(fixture, list, command, "none")
}

fn with_checkpoints(fixture: &JobFixture, list: &str, command: &str, folder: &str) -> Command {
    let file = fixture.path("hosts");
    fs::write(&file, list).unwrap();
    let job = fixture.command(1).option("hosts", file).option("host-command", command);
    job.option("checkpoint-dir", folder)
}

/// The namespace of a host, which is its name here.
fn name_of(network: &Network, host: u8) -> String {
    network.on(host).pop().unwrap()
}

/// Number of workers of each host.
fn spread(job: &Running, network: &Network) -> BTreeMap<u8, usize> {
    let mut spread = BTreeMap::new();
    for host in job.workers().into_values().filter_map(|pid| network.host_of(pid)) {
        *spread.entry(host).or_default() += 1;
    }
    spread
}

#[test]
#[ignore = "needs root and iproute2"]
fn workers_fill_the_slots_of_the_hosts_and_leave_a_host_that_is_switched_off() {
    let network = Network::new(4);
    let fixture = JobFixture { worker_timeout: Some("2s"), ..JobFixture::new(PROGRAMS, 4) };
    let fixture = fixture.lasting();
    let [first, second, third] = [1, 2, 3].map(|host| name_of(&network, host));
    let list = format!("{first} slots=2\n{second}\n{third}\n");
    let command = on_hosts(&fixture, &list, "ip netns exec {host}")
        .started_by(network.on(0))
        .option("listen", network.address(0));
    let mut job = command.start().keeping(fixture.folder);
    job.wait_for_work_of(4);
    assert_eq!(spread(&job, &network), BTreeMap::from([(1, 2), (2, 1), (3, 1)]));
    // One that is killed is replaced in its place.
    let (worker, pid) = job.members()[0];
    let host = network.host_of(pid).unwrap();
    send(pid, Signal::KILL);
    job.wait_for_members_without(4, &[worker]);
    assert_eq!(spread(&job, &network)[&host], if host == 1 { 2 } else { 1 });
    // The next master takes over the processes.
    job.kill_master();
    job.resume();
    job.wait_for_return_of(4);
    let lost: Vec<_> =
        job.workers().into_iter().filter(|(_, pid)| network.host_of(*pid) == Some(3)).collect();
    network.switch_off(3, false);
    let gone: Vec<_> = lost.iter().map(|(worker, _)| *worker).collect();
    job.wait_for_members_without(3, &gone);
    job.hurry();
    let workers = job.workers();
    let ended = job.wait();
    ended.assert_exact("a host is switched off");
    // Those that the master has ended, too: its command's process is that of the worker's group.
    for (_, pid) in workers.into_iter().chain(lost) {
        assert_end(&[pid], Duration::from_secs(60));
    }
}

#[test]
#[ignore = "needs root, iproute2 and the kernel's token bucket filter"]
fn a_host_whose_network_becomes_slow_is_named() {
    let network = Network::new(4);
    let fixture = JobFixture { parameters: 1 << 20, ..JobFixture::new(PROGRAMS, 3).lasting() };
    let list = [1, 2, 3].map(|host| name_of(&network, host));
    let command = on_hosts(&fixture, &list.join("\n"), "ip netns exec {host}")
        .started_by(network.on(0))
        .option("listen", network.address(0));
    let mut job = command.start().keeping(fixture.folder);
    job.wait_for_work_of(3);
    network.limit(2, "40mbit").unwrap();
    let found = job.wait_for("a slow link", |status| status.limiting_link.is_some());
    let link = found.limiting_link.unwrap();
    // Its link alone is slow, to whichever worker is next in the ring.
    assert_eq!(link.from_host.as_ref(), Some(&list[1]), "{link:?}");
    assert!((2e6..8e6).contains(&link.bytes_per_s), "{link:?}");
    network.unlimit(2).unwrap();
    job.hurry();
    let ended = job.wait();
    ended.assert_exact("a host is slow");
    let line = format!(" on {} to worker ", list[1]);
    assert!(ended.output.contains(&line), "{line}: {}", ended.output);
}

/// A server of ssh for this user, on this machine.
struct Sshd {
    child: Child,
    folder: tempfile::TempDir,
    port: u16,
}

impl Sshd {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        for key in ["host", "user"] {
            let mut made = Process::new("ssh-keygen");
            made.args(["-q", "-t", "ed25519", "-N", "", "-f", &path(key)]);
            assert!(made.status().unwrap().success());
        }
        fs::rename(path("user.pub"), path("authorized")).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\n\
             StrictModes no\nPermitRootLogin yes\nUsePAM no\nPidFile none\n",
            path("host"),
            path("authorized")
        );
        fs::write(path("config"), config).unwrap();
        fs::create_dir_all("/run/sshd").unwrap();
        let mut server = Process::new("/usr/sbin/sshd");
        server.args(["-D", "-e", "-f", &path("config")]).stderr(Stdio::null());
        Self { child: server.spawn().unwrap(), folder, port }
    }

    fn command(&self) -> String {
        let folder = self.folder.path().display();
        format!(
            "ssh -F none -o BatchMode=yes -o StrictHostKeyChecking=no -o ConnectionAttempts=20 \
             -o UserKnownHostsFile=/dev/null -i {folder}/user -p {} {{host}}",
            self.port
        )
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The children of a process.
fn children_of(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let of_thread = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children"));
    let children: Vec<_> = threads.filter_map(|thread| of_thread(thread).ok()).collect();
    children.join(" ").split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

#[test]
#[ignore = "needs root, ssh and sshd"]
fn workers_end_with_their_connection_and_no_argument_tells_the_token() {
    let sshd = Sshd::start();
    let fixture = JobFixture::new(PROGRAMS, 2).lasting();
    let command = on_hosts(&fixture, "127.0.0.1 slots=2", &sshd.command());
    let token = fixture.path("job/token");
    let mut job = command.start().keeping(fixture.folder);
    job.wait_for_work_of(2);
    let token = fs::read_to_string(token).unwrap();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let line = fs::read_to_string(process.path().join("cmdline")).unwrap_or_default();
        assert!(!line.contains(token.trim()), "{line}");
    }
    let before = job.workers();
    // All connections at once, as when the network of this machine fails.
    let sessions = children_of(sshd.child.id());
    assert_eq!(sessions.len(), 2);
    sessions.into_iter().for_each(|session| send(session, Signal::KILL));
    for pid in before.values() {
        assert_end(&[*pid], Duration::from_secs(60));
    }
    let gone: Vec<_> = before.keys().copied().collect();
    job.wait_for_members_without(2, &gone);
    job.hurry();
    let ended = job.wait();
    ended.assert_exact("all connections were lost");
    let lost = "the connection to 127.0.0.1 failed or ended";
    assert!(ended.output.contains(lost) && !ended.output.contains("(failure "), "{}", ended.output);
}

#[test]
fn events_name_the_host_of_a_worker_and_a_host_says_what_it_lacks() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    let job = on_hosts(&fixture, "first\nsecond", "env HOST={host}").option("listen", "127.0.0.1");
    let ended = job.run();
    for host in ["first", "second"] {
        assert!(ended.output.contains(&format!(" on {host} is up")), "{}", ended.output);
        let measured = format!(" host {host}: copies ");
        assert_eq!(ended.output.matches(&measured).count(), 1, "{}", ended.output);
    }
    let [folder, temporary] = ["", "none"].map(|name| fixture.path(name).into_os_string());
    for (folder, temporary, lacks) in [
        ("/none/such".into(), &folder, "no folder /none/such"),
        (folder.clone(), &temporary, "/none/elasticdl-host-"),
    ] {
        let output = host_process(&["true"], folder, temporary).wait_with_output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(lacks), "{error}");
    }
}

/// A host's process that runs this command in `folder`, with its own files in `temporary`.
fn host_process(command: &[&str], folder: OsString, temporary: &OsStr) -> Child {
    let launch = HostLaunch {
        program: command[0].into(),
        args: command[1..].iter().map(Into::into).collect(),
        env: Vec::new(),
        folder,
        files: vec![("TOKEN".into(), vec![1])],
        slot: (0, 1),
    };
    let mut process = Process::new(PROGRAMS.elasticdl);
    // It ends all processes of its group.
    process.arg("host-process").env("TMPDIR", temporary).process_group(0);
    process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = process.spawn().unwrap();
    // Some starters never pass on that it ends.
    serde_json::to_writer(process.stdin.as_mut().unwrap(), &launch).unwrap();
    process
}

#[test]
fn a_worker_ends_with_its_hosts_process_and_the_next_one_removes_the_token() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().as_os_str();
    let mut process = host_process(&["sh", "-c", "echo up; exec sleep 1000"], path.into(), path);
    let mut output = BufReader::new(process.stdout.take().unwrap());
    output.read_line(&mut String::new()).unwrap();
    let worker = children_of(process.id());
    assert_eq!(worker.len(), 1);
    process.kill().unwrap();
    assert_end(&worker, Duration::from_secs(60));
    process.wait().unwrap();
    assert_eq!(output.read_line(&mut String::new()).unwrap(), 0, "the connection has ended");
    assert_eq!(fs::read_dir(path).unwrap().count(), 1, "the token is left");
    let next = host_process(&["sh", "-c", "test -s $TOKEN"], path.into(), path);
    assert!(next.wait_with_output().unwrap().status.success());
    assert_eq!(fs::read_dir(path).unwrap().count(), 0);
}

#[test]
fn a_worker_that_gets_sigterm_with_its_hosts_process_leaves_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().as_os_str();
    let leaves = "trap 'sleep 0.3; echo left; exit 7' TERM; echo up; while :; do sleep 0.1; done";
    let mut process = host_process(&["sh", "-c", leaves], path.into(), path);
    let mut output = BufReader::new(process.stdout.take().unwrap());
    let mut line = || {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        line
    };
    assert_eq!(line(), "up\n");
    let both = [children_of(process.id()), vec![process.id()]].concat();
    both.into_iter().for_each(|pid| send(pid, Signal::TERM));
    assert_eq!((line().as_str(), process.wait().unwrap().code()), ("left\n", Some(7)));
}

#[test]
fn a_worker_that_sees_another_folder_of_checkpoints_is_told_from_one_that_shares_it() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    let folders = ["first", "second"].map(|host| fixture.path(host));
    folders.iter().for_each(|folder| fs::create_dir(folder).unwrap());
    // A path that leads each host's processes to a folder of its own.
    let path = "/proc/self/fd/9";
    let reach = fixture.path("reach");
    let start = |is_shared| {
        let host = if is_shared { "first" } else { "$1" };
        let folder = fixture.folder.path().display();
        fs::write(&reach, format!("exec 9<{folder}/{host}; shift; exec \"$@\"")).unwrap();
        let command = format!("/bin/sh {} {{host}}", reach.display());
        let job = with_checkpoints(&fixture, "first\nsecond", &command, path);
        job.option("listen", "127.0.0.1").option("min-workers", "2").run()
    };
    let entries = || folders.each_ref().map(|folder| fs::read_dir(folder).unwrap().count());
    let ended = start(false);
    let told = ["first", "second"].map(|host| {
        let of_host = |line: &&str| line.contains("the job failed: ") && line.contains(host);
        ended.output.lines().find(of_host).is_some()
    });
    assert!(ended.code == Some(1) && told[0] != told[1], "{}", ended.output);
    assert!(ended.output.contains(&format!("--checkpoint-dir {path}, as worker ")));
    assert_eq!((ended.summary().steps, entries()), (0, [0, 0]), "the probe is deleted");
    start(true).assert_exact("a shared folder");
    assert_eq!(entries(), [1, 0], "the last checkpoint");
}

#[test]
fn two_workers_that_see_other_folders_of_checkpoints_do_not_end_a_group_that_trains() {
    let fixture = JobFixture { micros_per_record: 1500, ..JobFixture::new(PROGRAMS, 3) };
    let hosts = ["first", "second", "third"];
    hosts.iter().for_each(|host| fs::create_dir(fixture.path(host)).unwrap());
    let (reach, folder) = (fixture.path("reach"), fixture.folder.path().display());
    fs::write(&reach, format!("exec 8<{folder}/$1; shift; exec \"$@\"")).unwrap();
    let command = format!("/bin/sh {} {{host}}", reach.display());
    let job = with_checkpoints(&fixture, &hosts.join("\n"), &command, "/proc/self/fd/8");
    let ended = job.option("listen", "127.0.0.1").run();
    ended.assert_exact("one host trains");
    let refused = |host: &&str| {
        let mut lines = ended.output.lines();
        lines.any(|line| line.contains(" sees it, is another folder") && line.contains(host))
    };
    assert_eq!(hosts.iter().filter(|host| refused(host)).count(), 2, "{}", ended.output);
}

#[test]
fn a_list_of_hosts_is_checked_before_the_job_starts() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    let refused = |job: Command, text: &str| {
        let ended = job.run();
        assert!(ended.output.contains(text), "{text:?} is not in: {}", ended.output);
    };
    refused(on_hosts(&fixture, "a slots=x", "ssh {host}"), "line 1: `slots=x` is not slots=N");
    refused(on_hosts(&fixture, "127.0.0.1", "ssh host"), "it has no {host}");
    refused(on_hosts(&fixture, "127.0.0.1", "./none {host}"), "--host-command: ");
    refused(on_hosts(&fixture, "no.such.host.invalid", "/bin/echo {host}"), "give --listen");
    let job = fixture.command(1).option("hosts", fixture.path("hosts"));
    refused(job, "--hosts: give --checkpoint-dir a folder that all hosts share");
}
