//! Models that also see pictures: what the host does between two graphs.
//!
//! A picture comes as patches that are cut and flattened already, in the order of the published processor: by blocks of
//! `merge x merge`, and frame by frame. Every frame is encoded by itself, as the published models attend within a frame
//! only. What is done with positions (three for each token) depends on data, so it is here and not in a graph; after the
//! pictures the ordinary graph goes on, at positions that lag behind the number of tokens.

use candle_core::{Device, Tensor};
use structures_graph::{Observer, Session, State};

use crate::model::Model;
use crate::ModelError;

/// Inputs of the picture graph beside [`POSITIONS`](crate::decoder::POSITIONS).
pub const PATCHES: &str = "patches";
/// Rows of the learned position table around each patch.
pub const TAPS: &str = "taps";
/// Their shares.
pub const SHARES: &str = "shares";
/// Inputs of the multimodal graph: what the pictures put in the place of embeddings, zero elsewhere.
pub const VISUAL: &str = "visual";
/// One where the embedding of the token stays, zero under a picture.
pub const KEPT: &str = "kept";

/// What a model's configuration says about pictures.
#[derive(Clone, Debug, PartialEq)]
pub struct Sight {
    /// Elements of a flattened patch.
    pub patch: usize,
    /// Patches merged along each side into one token.
    pub merge: usize,
    /// Side of the square table of learned positions.
    pub grid: usize,
    /// Tokens that stand for a merged patch.
    pub placeholders: Vec<u32>,
    /// Layers that get features of the encoder's inner layers.
    pub deep: usize,
}

/// A picture, or the frames of a video.
#[derive(Clone, Debug)]
pub struct Picture {
    /// `[frames * height * width, patch]`
    pub patches: Tensor,
    /// Frames, rows and columns of patches.
    pub grid: [usize; 3],
}

/// A prompt with pictures, run.
#[derive(Debug)]
pub struct Seen {
    /// Scores `[T, V]`.
    pub scores: Tensor,
    /// The position of the next token.
    pub position: usize,
}

/// The sessions of a model that sees.
pub struct Eyes {
    /// Encodes one frame.
    pub encoder: Session,
    /// Runs tokens and what was seen.
    pub prefill: Session,
}

impl std::fmt::Debug for Eyes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Eyes")
    }
}

fn wrong(what: &str, expected: impl Into<String>, found: impl Into<String>) -> ModelError {
    ModelError::Picture {
        what: what.into(),
        expected: expected.into(),
        found: found.into(),
    }
}

fn failed(e: candle_core::Error) -> ModelError {
    ModelError::compute("preparing pictures", e)
}

/// Runs a prompt with pictures into an empty state. `observers` see the encoder's values and the decoder's.
pub fn see(
    model: &Model,
    state: &mut State,
    tokens: &[u32],
    pictures: &[Picture],
    observers: [Option<&mut dyn Observer>; 2],
) -> Result<Seen, ModelError> {
    let (Some(sight), Some(eyes)) = (&model.description.sight, &model.eyes) else {
        return Err(wrong("model", "one that sees", model.name().to_string()));
    };
    if tokens.is_empty() {
        return Err(ModelError::EmptyPrompt);
    }
    if !state.is_empty() {
        let found = format!("{} tokens before", state.len());
        return Err(wrong("pictures", "them in the first prompt", found));
    }
    crate::generate::check(model, 0, tokens)?;
    let [encoder_observer, decoder_observer] = observers;
    let groups = groups(sight, tokens, pictures)?;
    let positions = positions(sight, tokens.len(), &groups);
    let features = encode(eyes, sight, pictures, encoder_observer)?;

    let n = tokens.len();
    let width = model.config().hidden_size;
    let mut kept = vec![1f32; n];
    for at in groups.iter().flat_map(|g| g.at.clone()) {
        kept[at] = 0.0;
    }
    // Features of all merged patches, one after another, where the placeholders stand.
    let placed = |rows: &[f32]| -> Result<Tensor, ModelError> {
        let mut all = vec![0f32; n * width];
        let places = groups.iter().flat_map(|g| g.at.clone());
        for (at, row) in places.zip(rows.chunks(width)) {
            all[at * width..(at + 1) * width].copy_from_slice(row);
        }
        Tensor::from_vec(all, (1, n, width), &Device::Cpu).map_err(failed)
    };
    let device = &Device::Cpu;
    let mut inputs = vec![
        Tensor::from_slice(tokens, (1, n), device).map_err(failed)?,
        Tensor::from_slice(&positions.concat(), (3, n), device).map_err(failed)?,
        Tensor::from_vec(kept, (1, n, 1), device).map_err(failed)?,
    ];
    for rows in &features {
        inputs.push(placed(rows)?);
    }
    let plan = eyes.prefill.host_plan();
    let outputs = eyes.prefill.run(&plan, &inputs, state, decoder_observer)?;
    let last = positions.iter().flatten().max().copied().unwrap_or(0);
    Ok(Seen {
        scores: outputs[0].squeeze(0).map_err(failed)?,
        position: last as usize + 1,
    })
}

/// A run of placeholders and the frames, rows and columns of patches that stand there.
#[derive(Clone, Debug, PartialEq)]
struct Group {
    at: std::ops::Range<usize>,
    grid: [usize; 3],
}

/// Runs of placeholders: one for each picture, or one for each frame of a video, whose frames stand apart.
fn groups(sight: &Sight, tokens: &[u32], pictures: &[Picture]) -> Result<Vec<Group>, ModelError> {
    let held = |t: u32| sight.placeholders.contains(&t);
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        if !held(*token) {
            continue;
        }
        match runs.last_mut() {
            Some(g) if g.end == at && tokens[g.start] == *token => g.end = at + 1,
            _ => runs.push(at..at + 1),
        }
    }
    let found = runs.len();
    let mut runs = runs.into_iter().peekable();
    let mut groups = Vec::with_capacity(found);
    for picture in pictures {
        let [t, h, w] = picture.grid;
        let fits = h.is_multiple_of(sight.merge) && w.is_multiple_of(sight.merge) && t * h * w > 0;
        if !fits || picture.patches.dims() != [t * h * w, sight.patch] {
            return Err(wrong(
                "patches",
                format!(
                    "[{}, {}] for frames, rows and columns {:?}, rows and columns multiples of {}",
                    t * h * w,
                    sight.patch,
                    picture.grid,
                    sight.merge
                ),
                format!("{:?}", picture.patches.dims()),
            ));
        }
        let frame = h * w / (sight.merge * sight.merge);
        let apart = runs.peek().is_some_and(|r| r.len() == frame) && t > 1;
        let (times, grid) = match apart {
            true => (t, [1, h, w]),
            false => (1, [t, h, w]),
        };
        for _ in 0..times {
            let Some(at) = runs.next() else {
                return Err(count(pictures, found));
            };
            if at.len() != grid[0] * frame {
                return Err(wrong(
                    "placeholder tokens of a picture",
                    (grid[0] * frame).to_string(),
                    at.len().to_string(),
                ));
            }
            groups.push(Group { at, grid });
        }
    }
    match runs.next() {
        None => Ok(groups),
        Some(_) => Err(count(pictures, found)),
    }
}

fn count(pictures: &[Picture], found: usize) -> ModelError {
    wrong(
        "runs of placeholder tokens",
        format!(
            "{}, one for each picture (or for each frame of a video)",
            pictures.len()
        ),
        found.to_string(),
    )
}

/// Frame, row and column of each token; text has three equal ones. A picture takes as many positions as its longer side
/// has merged patches.
fn positions(sight: &Sight, n: usize, groups: &[Group]) -> [Vec<u32>; 3] {
    let mut all: [Vec<u32>; 3] = Default::default();
    let mut next = 0u32;
    let mut at = 0;
    let mut push = |p: [u32; 3]| all.iter_mut().zip(p).for_each(|(v, p)| v.push(p));
    for Group { at: run, grid } in groups {
        while at < run.start {
            push([next; 3]);
            (next, at) = (next + 1, at + 1);
        }
        let [t, h, w] = *grid;
        let (h, w) = (h / sight.merge, w / sight.merge);
        for i in 0..t * h * w {
            let of = [i / (h * w), i / w % h, i % w];
            push(of.map(|p| next + p as u32));
        }
        (next, at) = (next + h.max(w) as u32, run.end);
    }
    while at < n {
        push([next; 3]);
        (next, at) = (next + 1, at + 1);
    }
    all
}

/// The features of all frames: those of the last layer, then those for the first layers of the decoder.
fn encode(
    eyes: &Eyes,
    sight: &Sight,
    pictures: &[Picture],
    mut observer: Option<&mut dyn Observer>,
) -> Result<Vec<Vec<f32>>, ModelError> {
    let mut features = vec![Vec::new(); 1 + sight.deep];
    let plan = eyes.encoder.host_plan();
    for picture in pictures {
        let [frames, h, w] = picture.grid;
        let places = places(sight.merge, h, w);
        let [positions, taps, shares] = look_ups(sight.grid, h, w, &places)?;
        for frame in 0..frames {
            let patches = picture.patches.narrow(0, frame * h * w, h * w);
            let patches = patches.and_then(|t| t.unsqueeze(0)).map_err(failed)?;
            let inputs = [patches, positions.clone(), taps.clone(), shares.clone()];
            let mut state = eyes.encoder.new_state(1, 0);
            let reborrowed = observer.as_mut().map(|o| &mut **o as &mut dyn Observer);
            let outputs = eyes.encoder.run(&plan, &inputs, &mut state, reborrowed)?;
            for (all, made) in features.iter_mut().zip(&outputs) {
                let rows = made.flatten_all().and_then(|t| t.to_vec1::<f32>());
                all.extend(rows.map_err(failed)?);
            }
        }
    }
    Ok(features)
}

/// Row and column of each patch of a frame, block by block.
fn places(merge: usize, h: usize, w: usize) -> Vec<[usize; 2]> {
    let mut places = Vec::with_capacity(h * w);
    for block in 0..(h / merge) * (w / merge) {
        let (row, column) = (block / (w / merge) * merge, block % (w / merge) * merge);
        for inside in 0..merge * merge {
            places.push([row + inside / merge, column + inside % merge]);
        }
    }
    places
}

/// Positions `[2,N]`, and the four neighbours of each patch in the table of learned positions with their shares
/// (`[4,N]`, `[4,N,1]`): the table is stretched over the picture, corner to corner.
fn look_ups(
    grid: usize,
    h: usize,
    w: usize,
    places: &[[usize; 2]],
) -> Result<[Tensor; 3], ModelError> {
    let n = places.len();
    let last = grid.saturating_sub(1);
    let along = |at: usize, size: usize| -> [(usize, f32); 2] {
        let source = at as f32 * last as f32 / (size - 1).max(1) as f32;
        let floor = source.floor();
        let low = (floor as usize).min(last);
        let share = source - floor;
        [(low, 1.0 - share), ((low + 1).min(last), share)]
    };
    let mut taps = vec![0u32; 4 * n];
    let mut shares = vec![0f32; 4 * n];
    for (i, [row, column]) in places.iter().enumerate() {
        for (a, (y, dy)) in along(*row, h).into_iter().enumerate() {
            for (b, (x, dx)) in along(*column, w).into_iter().enumerate() {
                let at = (2 * a + b) * n + i;
                taps[at] = (y * grid + x) as u32;
                shares[at] = dy * dx;
            }
        }
    }
    let side = |axis: usize| places.iter().map(move |p| p[axis] as u32);
    let positions: Vec<u32> = side(0).chain(side(1)).collect();
    let d = &Device::Cpu;
    Ok([
        Tensor::from_vec(positions, (2, n), d).map_err(failed)?,
        Tensor::from_vec(taps, (4, n), d).map_err(failed)?,
        Tensor::from_vec(shares, (4, n, 1), d).map_err(failed)?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGHT: Sight = Sight {
        patch: 3,
        merge: 2,
        grid: 4,
        placeholders: Vec::new(),
        deep: 0,
    };

    fn picture(grid: [usize; 3]) -> Picture {
        let n = grid.iter().product::<usize>();
        Picture {
            patches: Tensor::zeros((n, 3), candle_core::DType::F32, &Device::Cpu).unwrap(),
            grid,
        }
    }

    #[test]
    fn a_picture_takes_as_many_positions_as_its_longer_side() {
        let group = Group {
            at: 1..7,
            grid: [1, 4, 6],
        };
        let [t, h, w] = positions(&SIGHT, 9, std::slice::from_ref(&group));
        assert_eq!(t, [0, 1, 1, 1, 1, 1, 1, 4, 5]);
        assert_eq!(h, [0, 1, 1, 1, 2, 2, 2, 4, 5]);
        assert_eq!(w, [0, 1, 2, 3, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn placeholders_and_pictures_must_agree() {
        let sight = Sight {
            placeholders: vec![9],
            ..SIGHT
        };
        let groups = |tokens: &[u32], grids: &[[usize; 3]]| {
            let pictures: Vec<Picture> = grids.iter().map(|g| picture(*g)).collect();
            groups(&sight, tokens, &pictures).map_err(|e| e.to_string())
        };
        let fine = groups(&[1, 9, 9, 2, 9], &[[1, 2, 4], [1, 2, 2]]).unwrap();
        let at: Vec<_> = fine.into_iter().map(|g| g.at).collect();
        assert_eq!(at, [1..3, 4..5]);
        // Two frames together, and apart.
        let together = groups(&[9, 9, 1], &[[2, 2, 2]]).unwrap();
        assert_eq!((together.len(), together[0].grid), (1, [2, 2, 2]));
        let apart = groups(&[9, 1, 9], &[[2, 2, 2]]).unwrap();
        assert_eq!((apart.len(), apart[1].grid), (2, [1, 2, 2]));
        for (tokens, grid, word) in [
            (vec![1, 2], [1, 2, 2], "one for each picture"),
            (vec![1, 9], [1, 2, 4], "expected 2, found 1"),
            (vec![9, 1], [2, 2, 2], "one for each picture"),
            (vec![9, 1, 9], [1, 2, 2], "found 2"),
            (vec![1, 9], [1, 2, 3], "multiples of 2"),
        ] {
            let message = groups(&tokens, &[grid]).unwrap_err();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn patches_go_block_by_block_and_the_table_corner_to_corner() {
        let places = places(2, 2, 4);
        assert_eq!(places[..5], [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]]);
        let [positions, taps, shares] = look_ups(4, 2, 4, &places).unwrap();
        assert_eq!(positions.to_vec2::<u32>().unwrap()[1][..5], [0, 1, 0, 1, 2]);
        let taps = taps.to_vec2::<u32>().unwrap();
        let shares = shares.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        // The patch at row 1 of 2, column 1 of 4 is the table's at row 3, column 1.
        assert_eq!((taps[0][3], shares[3]), (13, 1.0));
        let sum: f32 = (0..4).map(|tap| shares[tap * 8 + 6]).sum();
        assert!((sum - 1.0).abs() < 1e-6);
    }
}
