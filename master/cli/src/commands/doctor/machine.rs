//! Checks of this machine: what the processes of a local job need.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{PidfdFlags, Resource, getpid, getrlimit, pidfd_open};

use super::finding::Finding;

/// Runs all checks that need no argument.
pub(super) fn check() -> Vec<Finding> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let libraries = Libraries::find();
    let mut findings = vec![
        Finding::good("processors", format!("{processors}")),
        check_processes(),
        check_shared_memory(),
        check_loopback(),
        check_open_files(getrlimit(Resource::Nofile).current),
        check_process_limit(getrlimit(Resource::Nproc).current),
    ];
    let gpus = (0..GPUS_MAX).filter(|gpu| Path::new(&format!("/dev/nvidia{gpu}")).exists()).count();
    findings.extend(check_gpus(gpus, &libraries));
    findings
}

/// Checks that a job's files can be written below `folder`.
pub(super) fn check_folder(subject: &'static str, folder: &Path) -> Finding {
    let shown = folder.display();
    match probe(folder) {
        Ok(free) if free < FREE_MIN => Finding::warning(
            subject,
            format!("{shown} has {} MiB left", free >> 20),
            "free space: checkpoints take three times the parameters with Adam",
        ),
        Ok(free) => {
            let gib = free as f64 / f64::from(1 << 30);
            Finding::good(subject, format!("{shown} is writable, {gib:.1} GiB are free"))
        }
        Err(error) => Finding::problem(
            subject,
            format!("can't write to {shown}: {error}"),
            format!("make {shown} writable, or use another folder (jobs: --job-dir)"),
        ),
    }
}

/// Writes a file to `folder`, or where it would be created. Returns the free bytes.
fn probe(folder: &Path) -> std::io::Result<u64> {
    let existing: PathBuf = std::path::absolute(folder)?;
    let existing =
        existing.ancestors().find(|folder| folder.exists()).unwrap_or_else(|| Path::new("/"));
    let path = existing.join(format!(".elasticdl-doctor-{}", std::process::id()));
    let mut file = std::fs::File::create_new(&path)?;
    let written = file.write_all(&[0; 4096]).and_then(|()| file.sync_all());
    let free = rustix::fs::fstatvfs(&file).map(|found| found.f_bavail * found.f_frsize);
    std::fs::remove_file(&path)?;
    written?;
    Ok(free?)
}

/// The master holds each worker by a descriptor of its process.
fn check_processes() -> Finding {
    match pidfd_open(getpid(), PidfdFlags::empty()) {
        Ok(_) => Finding::good("processes", "can be watched (pidfd)"),
        Err(error) => Finding::problem(
            "processes",
            format!("can't be watched: pidfd_open: {error}"),
            "use Linux 5.3 or newer, and a seccomp profile that allows pidfd_open",
        ),
    }
}

/// Workers of a host sum gradients in an anonymous file that all of them map.
fn check_shared_memory() -> Finding {
    let file = memfd_create("elasticdl-doctor", MemfdFlags::CLOEXEC);
    let sized = file.and_then(|file| rustix::fs::ftruncate(&file, 1 << 20));
    match sized {
        Ok(()) => Finding::good("shared memory", "can be created (memfd)"),
        Err(error) => Finding::warning(
            "shared memory",
            format!("can't be created: memfd_create: {error}; workers use TCP"),
            "use a seccomp profile that allows memfd_create",
        ),
    }
}

fn check_loopback() -> Finding {
    let listener = TcpListener::bind("127.0.0.1:0");
    let dialled = listener.and_then(|listener| TcpStream::connect(listener.local_addr()?));
    match dialled {
        Ok(_) => Finding::good("network", "127.0.0.1 accepts connections"),
        Err(error) => Finding::problem(
            "network",
            format!("127.0.0.1 accepts no connections: {error}"),
            "set the loopback interface up: ip link set lo up",
        ),
    }
}

fn check_open_files(limit: Option<u64>) -> Finding {
    let remedy = "ulimit -n 4096, or LimitNOFILE of the service";
    match limit {
        None => Finding::good("open files", "no limit"),
        Some(limit) if limit < FILES_MIN => {
            Finding::problem("open files", format!("at most {limit}"), remedy)
        }
        Some(limit) if limit < FILES_USUAL => {
            let text = format!("at most {limit}, which is enough for a few dozen workers");
            Finding::warning("open files", text, remedy)
        }
        Some(limit) => Finding::good("open files", format!("at most {limit}")),
    }
}

fn check_process_limit(limit: Option<u64>) -> Finding {
    match limit {
        Some(limit) if limit < PROCESSES_USUAL => Finding::warning(
            "process limit",
            format!("at most {limit} processes and threads of this user"),
            "ulimit -u 4096, or TasksMax of the service",
        ),
        Some(limit) => Finding::good("process limit", format!("at most {limit}")),
        None => Finding::good("process limit", "no limit"),
    }
}

/// Libraries that programs on GPUs load.
#[derive(Clone, Copy, Debug)]
struct Libraries {
    cuda: bool,
    nccl: bool,
}

impl Libraries {
    fn find() -> Self {
        // The list of the dynamic linker. Without it, only the folders of the user are searched.
        let known = Command::new("/sbin/ldconfig").arg("-p").output();
        let known = known.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        let known = known.unwrap_or_default();
        let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let has = |name: &str| {
            known.contains(name)
                || std::env::split_paths(&folders).any(|folder| folder.join(name).exists())
        };
        Self { cuda: has("libcuda.so.1"), nccl: has("libnccl.so.2") }
    }
}

fn check_gpus(gpus: usize, libraries: &Libraries) -> Vec<Finding> {
    if gpus == 0 {
        return vec![Finding::good("GPUs", "none; models compute on the processors")];
    }
    let mut findings = vec![if libraries.cuda {
        Finding::good("GPUs", format!("{gpus}, with NVIDIA's driver"))
    } else {
        Finding::warning(
            "GPUs",
            format!("{gpus}, but libcuda.so.1 is not found: programs compute on the processors"),
            "install NVIDIA's driver; in a container, use NVIDIA's container toolkit",
        )
    }];
    findings.push(if libraries.nccl {
        Finding::good("NCCL", "libnccl.so.2 is found")
    } else {
        Finding::warning(
            "NCCL",
            "libnccl.so.2 is not found: gradients travel through the memory of the host",
            "install libnccl2, or add its folder to LD_LIBRARY_PATH",
        )
    });
    findings
}

/// With fewer, a job of two workers can't open its connections and files.
const FILES_MIN: u64 = 64;
const FILES_USUAL: u64 = 1024;
const FREE_MIN: u64 = 1 << 30;
const GPUS_MAX: u32 = 64;
const PROCESSES_USUAL: u64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_judged_by_what_jobs_need() {
        let verdict = |limit| {
            let finding = check_open_files(limit);
            (finding.prevents_jobs(), finding != Finding::good("open files", ""))
        };
        assert_eq!(verdict(Some(63)), (true, true));
        assert!(!verdict(Some(64)).0 && !verdict(None).0);
        assert_eq!(check_open_files(Some(1024)), Finding::good("open files", "at most 1024"));
        assert_ne!(check_open_files(Some(1023)), Finding::good("open files", "at most 1023"));
        assert_eq!(check_process_limit(None), Finding::good("process limit", "no limit"));
        assert!(!check_process_limit(Some(100)).prevents_jobs());
    }

    #[test]
    fn a_gpu_without_its_libraries_is_reported() {
        let count = |gpus, cuda, nccl| check_gpus(gpus, &Libraries { cuda, nccl });
        assert_eq!(count(0, false, false).len(), 1);
        let good = [
            Finding::good("GPUs", "2, with NVIDIA's driver"),
            Finding::good("NCCL", "libnccl.so.2 is found"),
        ];
        assert_eq!(count(2, true, true), good);
        assert_eq!(count(2, true, false)[0], good[0]);
        assert_ne!(count(2, true, false)[1], good[1]);
        assert_ne!(count(2, false, true)[0], good[0]);
    }

    #[test]
    fn a_folder_is_writable_if_a_file_can_be_created_where_it_is_or_would_be() {
        let folder = tempfile::tempdir().unwrap();
        let absent = folder.path().join("a/b");
        assert!(!check_folder("storage", &absent).prevents_jobs());
        assert!(!absent.exists());
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(check_folder("storage", &file.join("a")).prevents_jobs());
        assert!(check_folder("storage", Path::new("/proc/a")).prevents_jobs());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
