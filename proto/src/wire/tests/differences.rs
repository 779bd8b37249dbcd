//! What is sent packed, or as its difference to the one before.

use super::*;
use crate::limits::PATH_BYTES_MAX;

#[test]
fn a_list_of_files_that_cannot_be_used_is_an_error_of_the_data_set() {
    let path = |i: u64| (format!("/a/long/path/to/some/part-{i:080}"), i);
    let list = FileList::pack((0..10_000).map(path));
    let mut bytes = Vec::new();
    JoinRequest::Message(WorkerMessage::Described(Ok(list.clone()))).encode(&mut None, &mut bytes);
    assert!(list.bytes() > 1 << 20 && bytes.len() < 1 << 18, "{}", bytes.len());
    let long_path = "x".repeat(PATH_BYTES_MAX + 1);
    let huge = DATASET_RECORDS_MAX;
    for (files, why) in [
        (vec![("", 1)], "an empty path"),
        (vec![(&*long_path, 1)], "a path of 4097 bytes"),
        (vec![("a", huge), ("b", 1)], "more than"),
        (vec![("a", u64::MAX), ("b", u64::MAX)], "more than"),
    ] {
        let described = WorkerMessage::Described(Ok(FileList::pack(files)));
        let Ok(WorkerMessage::Described(Err(error))) = checked(described) else {
            panic!("{why}: the list was accepted")
        };
        assert!(error.contains("the list of the data set's files can't be used"), "{error}");
        assert!(error.contains(why), "{error}");
    }
    let prepare = MasterMessage::Prepare(FileList::pack([("", 1)]));
    let prepare = received(JoinResponse::Message(prepare.into()));
    assert!(matches!(prepare, JoinResponse::Invalid(_)), "{prepare:?}");
}

#[test]
fn a_membership_is_sent_as_its_difference_to_the_one_before_on_the_stream() {
    let of = |generation: u64, ids: std::ops::Range<u64>| {
        let address = |id| SocketAddr::from(([10, 0, 0, 1], 1000 + id as u16));
        let members = ids.map(|id| (WorkerId(id), address(id))).collect();
        let membership = Membership { generation: Generation(generation), members, abort: true };
        SharedMessage::from(MasterMessage::Membership(membership))
    };
    let messages = [of(1, 0..100), of(2, 1..100), of(3, 1..101), of(4, 60..140)];
    let (mut sent, mut received) = (None, Members::default());
    let mut sizes = Vec::new();
    for message in &messages {
        let (mut bytes, shared) = (Vec::new(), JoinResponse::Message(message.clone()));
        shared.clone().encode(&mut sent, &mut bytes);
        sizes.push(bytes.len());
        assert_eq!(JoinResponse::decode(&mut received, &mut &bytes[..]).unwrap(), shared);
    }
    // The last two have too little in common.
    assert!(sizes[0] > 800 && sizes[1] < 10 && sizes[2] < 20 && sizes[3] > 600, "{sizes:?}");
    // A stream on which the one before was not sent gets all members.
    let (mut bytes, shared) = (Vec::new(), JoinResponse::Message(messages[2].clone()));
    shared.encode(&mut Some(messages[0].clone()), &mut bytes);
    assert!(bytes.len() > 800, "{}", bytes.len());
    // A difference to members that the worker does not have is an error that says so.
    let mut bytes = Vec::new();
    let shared = JoinResponse::Message(messages[1].clone());
    shared.encode(&mut Some(messages[0].clone()), &mut bytes);
    let decoded = JoinResponse::decode(&mut Members::default(), &mut &bytes[..]).unwrap();
    assert!(matches!(&decoded, JoinResponse::Invalid(why) if why.contains("left")), "{decoded:?}");
}
