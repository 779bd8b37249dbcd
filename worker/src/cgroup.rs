//! The memory limit of this process's cgroup.

use std::fs;
use std::path::Path;

/// The least memory limit of the cgroup of this process and those that contain it, in bytes;
/// `None`: there is none, as on a machine without containers.
pub(crate) fn memory_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    limit_in(Path::new("/sys/fs/cgroup"), &groups)
}

/// `groups`: content of `/proc/self/cgroup`, whose hierarchies are mounted below `root`.
fn limit_in(root: &Path, groups: &str) -> Option<u64> {
    let limits = groups.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        let (mount, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => return Vec::new(),
        };
        let folder = mount.join(group.trim_start_matches('/'));
        // In a container, its own cgroup may be mounted as the root, whatever its name outside.
        let folders = folder.ancestors().take_while(|folder| folder.starts_with(&mount));
        folders.filter_map(|folder| fs::read_to_string(folder.join(file)).ok()).collect()
    });
    let limits = limits.filter_map(|text| text.trim().parse().ok());
    limits.filter(|limit| *limit < UNLIMITED).min()
}

/// The first version of cgroups has a number near 2^63 where there is no limit.
const UNLIMITED: u64 = 1 << 62;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_the_cgroups_around_a_process_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let limit = |groups| limit_in(root.path(), groups);
        let second = "0::/jobs/a\n";
        assert_eq!(limit(second), None);
        write("jobs/a/memory.max", "max\n");
        assert_eq!(limit(second), None);
        write("jobs/memory.max", "4096\n");
        write("jobs/a/memory.max", "8192\n");
        write("others/memory.max", "1\n");
        assert_eq!((limit(second), limit("0::/\n")), (Some(4096), None));
        let first = "5:cpu,cpuacct:/x\n4:memory:/pods/p\n0::/\n";
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit(first), None);
        write("memory/pods/p/memory.limit_in_bytes", "2048\n");
        assert_eq!(limit(first), Some(2048));
        // A container that has a name outside only.
        write("memory/memory.limit_in_bytes", "1024\n");
        assert_eq!(limit("4:memory:/kubepods/q\n"), Some(1024));
        assert_eq!(limit("no cgroup"), None);
    }
}
