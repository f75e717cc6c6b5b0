//! Picking calibration frames that cover a recorded data set: a pure function, no random number.
//!
//! Frames of one episode resemble each other, so `n` frames are spread over episodes first and inside each
//! episode second.

use std::collections::{BTreeMap, HashSet};

use super::StatsError;

/// A table of recorded frames with named integer columns: `episode`, `frame`, `index`, and `task` where a
/// filter is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrameTable {
    /// Column names.
    pub columns: Vec<String>,
    /// One value a column.
    pub rows: Vec<Vec<i64>>,
}

struct Frame {
    episode: i64,
    frame: i64,
    index: i64,
}

/// The `index` of up to `n` frames (fewer when the pool is smaller), none of them in `exclude`, none twice.
///
/// Episodes are sorted; `min(E, max(n/2, 3))` of them are taken at a stride of `max(1, E / that)`; from each
/// every `max(1, len / ceil(n / chosen))`-th frame from its first on, until there are `n`; what is still
/// missing is taken in table order.
///
/// # Errors
/// `n` below 1, missing columns, a filter that matches no row, a row of the wrong length.
pub fn stratified(
    table: &FrameTable,
    n: i64,
    task: Option<i64>,
    exclude: &[i64],
) -> Result<Vec<i64>, StatsError> {
    let wanted = usize::try_from(n).ok().filter(|n| *n > 0);
    let wanted = wanted.ok_or(StatsError::PickCount { found: n })?;
    let pool = table.pool(task)?;
    let mut episodes: BTreeMap<i64, Vec<&Frame>> = BTreeMap::new();
    for frame in &pool {
        episodes.entry(frame.episode).or_default().push(frame);
    }
    let count = episodes.len().min((wanted / 2).max(3));
    let stride = episodes.len().checked_div(count).unwrap_or(1).max(1);
    let chosen: Vec<Vec<&Frame>> = episodes.into_values().step_by(stride).take(count).collect();

    let mut taken: HashSet<i64> = exclude.iter().copied().collect();
    let mut picked = Vec::new();
    let mut take = |frame: &Frame| {
        if picked.len() < wanted && taken.insert(frame.index) {
            picked.push(frame.index);
        }
    };
    for mut frames in chosen {
        frames.sort_by_key(|f| f.frame);
        let step = (frames.len() / wanted.div_ceil(count)).max(1);
        frames.into_iter().step_by(step).for_each(&mut take);
    }
    pool.iter().for_each(&mut take);
    Ok(picked)
}

impl FrameTable {
    fn pool(&self, task: Option<i64>) -> Result<Vec<Frame>, StatsError> {
        let place = |name: &str| self.columns.iter().position(|c| c == name);
        let (Some(episode), Some(frame), Some(index), true) = (
            place("episode"),
            place("frame"),
            place("index"),
            task.is_none() || place("task").is_some(),
        ) else {
            let mut needed = vec!["episode", "frame", "index"];
            needed.extend(task.map(|_| "task"));
            let missing = needed.into_iter().filter(|name| place(name).is_none());
            return Err(StatsError::MissingColumns {
                missing: missing.map(String::from).collect(),
                present: self.columns.clone(),
            });
        };
        let mut pool = Vec::new();
        for (i, row) in self.rows.iter().enumerate() {
            if row.len() != self.columns.len() {
                return Err(StatsError::Shape {
                    what: format!("row {i} of the frame table"),
                    expected: format!("{} values", self.columns.len()),
                    found: format!("{}", row.len()),
                });
            }
            if task.is_none() || place("task").map(|t| row[t]) == task {
                pool.push(Frame {
                    episode: row[episode],
                    frame: row[frame],
                    index: row[index],
                });
            }
        }
        match task {
            Some(task) if pool.is_empty() => Err(StatsError::EmptyFilter { task }),
            _ => Ok(pool),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(episodes: i64, length: i64) -> FrameTable {
        let columns = ["task", "episode", "frame", "index"]
            .map(String::from)
            .to_vec();
        let mut rows = Vec::new();
        for e in 0..episodes {
            for f in 0..length {
                rows.push(vec![e % 2, e, f, e * length + f]);
            }
        }
        FrameTable { columns, rows }
    }

    #[test]
    fn b_069_eight_of_three_hundred_are_distinct_and_from_two_episodes_at_least() {
        let picked = stratified(&table(3, 100), 8, None, &[]).unwrap();
        assert_eq!(picked.len(), 8);
        assert_eq!(picked.iter().collect::<HashSet<_>>().len(), 8);
        let episodes: HashSet<i64> = picked.iter().map(|i| i / 100).collect();
        assert!(episodes.len() >= 2, "{picked:?}");
    }

    #[test]
    fn b_069_excluded_frames_are_never_returned_and_the_rest_is_topped_up() {
        let exclude: Vec<i64> = (0..25).collect();
        let picked = stratified(&table(3, 10), 5, None, &exclude).unwrap();
        assert_eq!(picked, [25, 26, 27, 28, 29]);
        let all = stratified(&table(3, 10), 99, None, &[3]).unwrap();
        assert_eq!(all.len(), 29);
    }

    #[test]
    fn the_order_of_rows_does_not_matter_before_the_top_up() {
        let mut shuffled = table(4, 12);
        shuffled.rows.reverse();
        for n in [1, 2, 8] {
            let plain = stratified(&table(4, 12), n, Some(1), &[]).unwrap();
            assert_eq!(stratified(&shuffled, n, Some(1), &[]).unwrap(), plain);
        }
    }

    #[test]
    fn b_070_bad_requests_are_named() {
        let t = table(2, 3);
        assert_eq!(
            stratified(&t, 0, None, &[]),
            Err(StatsError::PickCount { found: 0 })
        );
        assert!(stratified(&t, -1, None, &[]).is_err());
        assert_eq!(
            stratified(&t, 2, Some(9), &[]),
            Err(StatsError::EmptyFilter { task: 9 })
        );
        let mut bare = t.clone();
        bare.columns = vec!["a".into(), "episode".into(), "b".into(), "c".into()];
        let text = stratified(&bare, 2, Some(0), &[]).unwrap_err().to_string();
        assert!(text.contains("frame, index, task"), "{text}");
        let mut short = t;
        short.rows[1].pop();
        assert!(stratified(&short, 2, None, &[]).is_err());
        let empty = FrameTable {
            rows: vec![],
            ..table(1, 1)
        };
        assert_eq!(stratified(&empty, 2, None, &[]), Ok(vec![]));
    }
}
