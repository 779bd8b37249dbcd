//! Instances of GPUs (MIG). A process sees only the first one of those that it may use, so each
//! worker is given one.

/// Value of `CUDA_VISIBLE_DEVICES` for the worker with this index among those of its machine or
/// pod, where `variable` reads its environment; `None` where the variables list no instances.
#[must_use]
pub fn gpu_instance(index: u32, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let visible =
        ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"].into_iter().find_map(variable)?;
    let instances: Vec<_> =
        visible.split(',').map(str::trim).filter(|device| device.starts_with("MIG-")).collect();
    let index = (index as usize).checked_rem(instances.len())?;
    Some(instances[index].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_worker_has_an_instance_of_its_own() {
        let of = |index, set: &[(&str, &str)]| {
            let value = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).into());
            gpu_instance(index, value)
        };
        let (cuda, nvidia) = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES");
        assert_eq!(of(0, &[]), None);
        assert_eq!(of(1, &[(nvidia, "all")]), None);
        assert_eq!(of(1, &[(cuda, "0,1")]), None);
        let pod = [(nvidia, "MIG-a, MIG-b")];
        let given = [0, 1, 2].map(|index| of(index, &pod).unwrap());
        assert_eq!(given, ["MIG-a", "MIG-b", "MIG-a"]);
        // What the user selects wins.
        assert_eq!(of(1, &[(cuda, "MIG-c"), (nvidia, "MIG-a,MIG-b")]), Some("MIG-c".into()));
    }
}
